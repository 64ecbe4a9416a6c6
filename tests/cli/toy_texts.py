"""Short texts, and a PDF of them."""

from __future__ import annotations

TEXTS = {
    "ships.txt": "The harbour master logs every vessel that passes the northern breakwater, with its tonnage.",
    "bees.md": "A colony of bees keeps its brood at thirty-five degrees, whatever the weather outside may be.",
    "clocks.html": "<p>Quartz oscillators drift with temperature, so marine chronometers sit in gimballed boxes.</p>",
}
QUESTION = "Which vessel passes the breakwater?"
BREAD = "Rye doughs are sour because wild yeast and lactic bacteria grow together over two long days."


def pdf_of(*pages: str) -> bytes:
    """A PDF with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    parts = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET"
        parts.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 900 200] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        parts.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    data, offsets = "%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{part}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size, start = len(parts) + 1, len(data)
    data += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer << /Size {size} /Root 1 0 R >>\n"
    return f"{data}startxref\n{start}\n%%EOF\n".encode()
