"""Pictures by a browser: docs/images/report.png, and pages as they look at several widths, in light and dark.

    python scripts/docs_site/pictures.py report                       # of a short training on four ranks
    python scripts/docs_site/pictures.py look runs/site/index.html    # into runs/looked, for eyes

It needs Chromium (`apt-get install chromium`), and Pillow, which matplotlib brings.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "images" / "report.png"
REPORT_SIZE = (1000, 1210)  # down to the end of the timeline of four ranks
# Without explanations, and charts that look like the first one.
REPORT_STYLE = "<style>section > p, #exposed, #waits { display: none } section { margin-top: 24px }</style>"
WIDTHS = (400, 800, 1200)
PROGRAM = ("scripts/train.py", "--epochs", "3", "--batch-size", "48")
FRAME = (
    '<body style="margin: 0"><iframe src="{page}" '
    'style="width: {width}px; height: {height}px; border: 0; display: block"></iframe></body>'
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def screenshot(page: Path, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Write a page as a PNG file.

    Chromium has no window narrower than 500 pixels, and takes its own bars off the height: the page is shown
    in a frame of the size that is asked for, in a window that is larger.

    Raises:
        SystemExit: there is no browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is on this machine")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as profile:
        frame = Path(profile, "frame.html")
        frame.write_text(FRAME.format(page=page.resolve().as_uri(), width=width, height=height))
        options += [f"--user-data-dir={profile}", f"--window-size={max(width, 500)},{height + 200}"]
        options += ["--virtual-time-budget=5000"]  # for the scripts of the page
        command = [browser, *options, f"--screenshot={picture.resolve()}", frame.as_uri()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
    with Image.open(picture) as shot:
        shot.crop((0, 0, width, height)).save(picture)


def report() -> None:
    """Record a short training on four ranks, and draw the page that `trace` makes of it."""
    mpisgd = [sys.executable, "-m", "mpisgd"]
    with tempfile.TemporaryDirectory() as folder:
        record, page = Path(folder, "run.json"), Path(folder, "report.html")
        settings = {**os.environ, "MPISGD_TIMELINE": str(record)}
        subprocess.run([*mpisgd, "run", "-n", "4", *PROGRAM], check=True, cwd=ROOT, env=settings)
        subprocess.run([*mpisgd, "trace", str(record), "--steps", "40:42", "--html", str(page)], check=True)
        page.write_text(page.read_text().replace("</head>", f"{REPORT_STYLE}</head>"))
        screenshot(page, REPORT, *REPORT_SIZE)


def look(pages: list[Path], height: int) -> None:
    """Write each page at each width, in light and dark."""
    folder = ROOT / "runs" / "looked"
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        for width in WIDTHS:
            for dark in (False, True):
                picture = folder / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png"
                screenshot(page, picture, width, height, dark=dark)
                print(picture)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report", help="write docs/images/report.png")
    looked = commands.add_parser("look", help="write pages at several widths into runs/looked")
    looked.add_argument("pages", nargs="+", type=Path)
    looked.add_argument("--height", type=int, default=1400)
    given = parser.parse_args()
    if given.command == "report":
        report()
    else:
        look(given.pages, given.height)


if __name__ == "__main__":
    main()
