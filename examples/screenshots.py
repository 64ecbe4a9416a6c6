"""Draw the pictures of docs/explain.md and CONTRIBUTING.md: `python examples/screenshots.py`, or one: `... site`.

Needs Chromium (Debian: `apt install chromium`) and Pillow. `answer` needs the demo model (`make demo` fetches it) and a
minute, `site` what `make docs` has built.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp's spinning costs 2-4x on a shared machine

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rag_blend_app.corpus import load_documents

from rag_blend import BlendEngine, Generation
from rag_blend.demo import demo_model_dir

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 150_000
ANSWER_SIZE, SITE_SIZE = (1160, 1180), (1000, 900)
LIGHT, DARK = "1", "0"  # Chromium's numbers for prefers-color-scheme
HEAD = "<|im_start|>user\nContext from the reference of the Python language is below.\n---------------------\n"
OTHER_HEAD = "<|im_start|>user\nThese are notes about a programming language, in no order.\n---------------------\n"
TAIL = "\n---------------------\nWhat do !r and !s mean in a format string?<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Camera:
    """Photographs pages, in few colours so that the files stay small."""

    chromium: str
    profile: Path  # Chromium's, of nobody else

    def shoot(self, page: Path, target: Path, scheme: str, size: tuple[int, int]) -> None:
        subprocess.run(
            [
                self.chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={self.profile}", f"--blink-settings=preferredColorScheme={scheme}",
                f"--window-size={size[0]},{size[1]}", f"--screenshot={target}", page.as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        # This method keeps rare colours, such as those of the times' swatches.
        few = Image.open(target).convert("RGB").quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(target, optimize=True)
        num_bytes = target.stat().st_size
        if num_bytes > MAX_BYTES:
            sys.exit(f"{target} takes {num_bytes:,} bytes, more than {MAX_BYTES:,}: make the window smaller")
        print(f"{target}: {num_bytes:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", nargs="*", choices=["answer", "site"], help="default: both")
    chosen = parser.parse_args().picture or ["site", "answer"]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium: apt install chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        camera = Camera(chromium, Path(scratch) / "profile")
        if "site" in chosen:
            draw_site(camera)
        if "answer" in chosen:
            draw_answer(camera, Path(scratch))


def draw_site(camera: Camera) -> None:
    page = ROOT / "site" / "index.html"
    if not page.exists():
        sys.exit("there is no site: make docs")
    camera.shoot(page, IMAGES / "site.png", LIGHT, SITE_SIZE)


def draw_answer(camera: Camera, scratch: Path) -> None:
    page = answered(scratch / "kv").save_html(scratch / "answer.html")
    for name, scheme in (("answer.png", LIGHT), ("answer-dark.png", DARK)):
        camera.shoot(page, IMAGES / name, scheme, ANSWER_SIZE)


def answered(storage: Path) -> Generation:
    """An answer with all that can happen: chunks whole and cut, a header in no chunk, one stored for another head."""
    texts = [doc.text[:1900].strip() for doc in load_documents()[:6]]
    with BlendEngine.from_pretrained(demo_model_dir(), storage) as engine:
        engine.ingest(texts[:4], head=HEAD)
        engine.ingest(texts[5:], head=OTHER_HEAD)
        context = [texts[2], f"title: {texts[1].splitlines()[0]}\n\n{texts[1]}", texts[0][500:], texts[5]]
        prompt = HEAD + "\n\n".join(context) + TAIL
        return engine.generate(prompt, 40, add_special_tokens=False, do_sample=False)


if __name__ == "__main__":
    main()
