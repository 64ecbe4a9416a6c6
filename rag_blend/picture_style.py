"""The style sheet of pictures. Okabe's and Ito's colours, which the colour-blind tell apart; each has a line, too."""

_DARK = """--ink:#e4e7ea; --soft:#9aa4ae; --paper:#15181b; --panel:#1d2125; --line:#343a41;
  --k0:#1fc795; --k1:#6cc0f0; --k2:#f0ae26; --k3:#7d8690; --miss:#ff9466; --tint:24%;"""
# The dark colours twice: for who prefers them, and for a dark JupyterLab.
STYLE = """
.rag-blend { --ink:#1c2024; --soft:#5d6670; --paper:#fff; --panel:#f5f6f8; --line:#d7dbe0;
  --k0:#009e73; --k1:#56b4e9; --k2:#e69f00; --k3:#8a929b; --miss:#b3400a; --tint:18%;
  color:var(--ink); background:var(--paper); border:1px solid var(--line); border-radius:8px; padding:18px 22px;
  font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; max-width:1080px; }
@media (prefers-color-scheme:dark) { .rag-blend { DARK } }
[data-jp-theme-light="false"] .rag-blend { DARK }
.rag-blend h1 { font-size:17px; font-weight:600; margin:0 0 2px; }
.rag-blend h2 { font-size:12px; font-weight:600; margin:20px 0 6px; color:var(--soft); letter-spacing:.04em;
  text-transform:uppercase; }
.rag-blend p { margin:0; }
.rag-blend .soft { color:var(--soft); }
.rag-blend .answer { white-space:pre-wrap; overflow-wrap:anywhere; unicode-bidi:isolate; }
.rag-blend .bar { display:flex; height:22px; border-radius:4px; overflow:hidden; background:var(--panel); }
.rag-blend .bar i { box-sizing:border-box; min-width:2px; border-right:1px solid var(--paper); }
.rag-blend ul { display:flex; flex-wrap:wrap; gap:4px 20px; list-style:none; margin:8px 0 0; padding:0; }
.rag-blend li { margin:0; white-space:nowrap; }
.rag-blend .swatch { display:inline-block; width:12px; height:12px; margin-right:6px; border-radius:2px;
  vertical-align:-1px; }
.rag-blend .k0 { --is:"reused exactly"; background:color-mix(in srgb,var(--k0) var(--tint),transparent);
  border-bottom:3px double var(--k0); }
.rag-blend .k1 { --is:"reused"; background:color-mix(in srgb,var(--k1) var(--tint),transparent);
  border-bottom:1px solid var(--k1); }
.rag-blend .k2 { --is:"recomputed"; background:color-mix(in srgb,var(--k2) calc(2*var(--tint)),transparent);
  border-bottom:3px solid var(--k2); }
.rag-blend .k3 { --is:"fresh"; border-bottom:1px dotted var(--k3); }
.rag-blend .k0,.rag-blend .k1,.rag-blend .k2,.rag-blend .k3 { --in:""; padding:1px 0; }
.rag-blend .sample { padding:1px 7px; margin-right:7px; font-family:ui-monospace,Menlo,"DejaVu Sans Mono",monospace; }
.rag-blend .t-tokenise { background:#cc79a7; } .rag-blend .t-queue { background:#999; }
.rag-blend .t-plan { background:#f0e442; } .rag-blend .t-storage { background:#d55e00; }
.rag-blend .t-select { background:#e69f00; } .rag-blend .t-compute { background:#0072b2; }
.rag-blend .frame { position:relative; border:1px solid var(--line); border-radius:6px; margin-top:10px;
  padding-bottom:26px; background:var(--panel); overflow:hidden; }
.rag-blend .prompt { max-height:min(60vh,44em); overflow:auto; padding:10px 14px; white-space:pre-wrap;
  overflow-wrap:anywhere; unicode-bidi:isolate; background:var(--paper);
  font:13px/1.85 ui-monospace,Menlo,"DejaVu Sans Mono",monospace; }
.rag-blend .hint,.rag-blend [data-t]:hover::after { position:absolute; left:0; right:0; bottom:0; height:26px;
  padding:0 14px; font:12px/26px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
  background:var(--panel); color:var(--soft); border-top:1px solid var(--line); white-space:nowrap; }
.rag-blend [data-t]:hover { outline:2px solid var(--ink); outline-offset:0; border-radius:1px; }
.rag-blend [data-t]:hover::after { content:attr(data-t) "  ·  " var(--is) var(--in); color:var(--ink); }
.rag-blend .prompt i::before { content:"\u21b5"; font-style:normal; 
  color:var(--soft); opacity:.6; }
.rag-blend .chip { display:inline-block; min-width:1.5em; padding:0 .35em; margin:0 3px 0 0; border-radius:3px;
  font:600 11px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; text-align:center;
  background:var(--ink); color:var(--paper); user-select:none; vertical-align:1px; }
.rag-blend .scroll { overflow-x:auto; }
.rag-blend table { border-collapse:collapse; width:100%; font-size:13px; margin:0; }
.rag-blend th { font-weight:600; color:var(--soft); text-align:left; border-bottom:1px solid var(--line); }
.rag-blend th,.rag-blend td { padding:5px 12px 5px 0; vertical-align:top; white-space:nowrap; text-align:left;
  background:none; }
.rag-blend td { border-bottom:1px solid color-mix(in srgb,var(--line) 55%,transparent); }
.rag-blend .number { text-align:right; font-variant-numeric:tabular-nums; }
.rag-blend .text { white-space:normal; width:100%; min-width:16em; overflow-wrap:anywhere; unicode-bidi:isolate; }
.rag-blend .miss { color:var(--miss); font-weight:600; }
.rag-blend code { font:12px ui-monospace,Menlo,"DejaVu Sans Mono",monospace; color:var(--soft); background:none; }
""".replace("DARK", _DARK)
