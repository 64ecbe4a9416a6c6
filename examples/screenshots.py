"""Draw the pictures of docs/explain.md: `python examples/screenshots.py`.

Needs the demo model (`make demo` fetches it), Chromium (Debian: `apt install chromium`) and Pillow. Takes a minute.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp's spinning costs 2-4x on a shared machine

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rag_blend_app.corpus import load_documents

from rag_blend import BlendEngine, Generation
from rag_blend.demo import demo_model_dir

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MAX_BYTES = 150_000
SIZE = (1160, 1180)
LIGHT, DARK = "1", "0"  # Chromium's numbers for prefers-color-scheme
HEAD = "<|im_start|>user\nContext from the reference of the Python language is below.\n---------------------\n"
OTHER_HEAD = "<|im_start|>user\nThese are notes about a programming language, in no order.\n---------------------\n"
TAIL = "\n---------------------\nWhat do !r and !s mean in a format string?<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium: apt install chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        page = answered(Path(scratch) / "kv").save_html(Path(scratch) / "answer.html")
        for name, scheme in (("answer.png", LIGHT), ("answer-dark.png", DARK)):
            shot(chromium, page, IMAGES / name, scheme)


def answered(storage: Path) -> Generation:
    """An answer with all that can happen: chunks whole and cut, a header in no chunk, one stored for another head."""
    texts = [doc.text[:1900].strip() for doc in load_documents()[:6]]
    with BlendEngine.from_pretrained(demo_model_dir(), storage) as engine:
        engine.ingest(texts[:4], head=HEAD)
        engine.ingest(texts[5:], head=OTHER_HEAD)
        context = [texts[2], f"title: {texts[1].splitlines()[0]}\n\n{texts[1]}", texts[0][500:], texts[5]]
        prompt = HEAD + "\n\n".join(context) + TAIL
        return engine.generate(prompt, 40, add_special_tokens=False, do_sample=False)


def shot(chromium: str, page: Path, target: Path, scheme: str) -> None:
    """Photograph a page, in few colours so that the file stays small."""
    subprocess.run(
        [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={page.parent / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={target}", page.as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    # This method keeps rare colours, such as those of the times' swatches.
    few = Image.open(target).convert("RGB").quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(target, optimize=True)
    size = target.stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"{target} takes {size:,} bytes, more than {MAX_BYTES:,}: make the window smaller")
    print(f"{target}: {size:,} bytes")


if __name__ == "__main__":
    main()
