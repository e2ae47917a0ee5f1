"""What of a page looks like the result of a measurement.

A number with a unit, a number with a point, a cell of a table that is a number, one of so many, and times in
words. Not looked at: code (but a quoted number is no code), links, comments, tables of
benchmarks/, and versions of known programs.
"""

import bisect
import itertools
import re

NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
WORD = r"(?:half an?|one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|forty|sixty)"
TIME = r"(?:nano|micro|milli)?seconds?|minutes?|hours?"
MORE = r"(?:times|x) (?:as|the|faster|slower|longer|shorter|smaller|larger|fewer|less|more)"
BYTES = r"[KMGT]?i?B(?:/s)?|bytes|[kKMG]?bit/s"
RATE = r"k?[ ]?\w+(?:/s|[ ]per[ ]s(?:econd)?)"
UNIT = rf"%|percent|per cent|{RATE}|[nu\u00b5\u03bcm]?s|{TIME}|min|h|{BYTES}|[MGT]?Hz|[x\u00d7]|-fold|{MORE}"
PROGRAMS = "Python PyTorch Torch torch MPI MPICH Horovod Lightning Accelerate Slurm Debian hadolint NCCL CUDA"
PROGRAM = PROGRAMS.replace(" ", "|")

# What figures.py writes.
BLOCK = (
    r"(?P<begin><!-- generated: benchmarks/(?P<name>\S+)\.md(?P<options>\s.*?)-->\n)"
    r".*?(?P<end><!-- end of generated -->)"
)
# Written over by spaces, so that lines keep their numbers.
IGNORED = re.compile(
    r"^(?P<fence>[ ]*(?:`{3,}|~{3,})).*?^(?P=fence)[^\S\n]*$"
    rf"|{BLOCK}"
    r"|<!--.*?-->"
    r"|`+(?P<quoted>(?:[^`\n]|\n(?!\s*\n))*)`+"
    r"|\]\([^)\n]*\)"
    r"|https?://\S+"
    rf"|\b(?:{PROGRAM})[ ]v?\d+(?:\.\d+)+(?:(?:,| and| or| to)[ ]\d+(?:\.\d+)+)*\b(?![ ]?(?:{UNIT})(?!\w))"
    r"|\b\d+\.\d+\.\d+\S*",
    re.DOTALL | re.MULTILINE,
)
MEASURED = re.compile(
    rf"(?<![\w.^]){NUMBER}(?:[ ](?:to|and|or)[ ]{NUMBER})?[ ]?(?:{UNIT})(?!\w)"
    rf"|(?<![\w.])(?<!rank[ ]){NUMBER}[ ]of[ ]{NUMBER}\b"
    r"|(?<![\w./-])\d+\.\d+(?:e[+-]?\d+)?(?![\w.]*\d\.\d)"
    r"|\b\d+[ ](?:passed|failed|skipped)\b"
    rf"|\b{WORD}[ ](?:(?:{TIME})|{MORE})\b"
    r"|\b(?:twice|thrice|half)[ ](?:as[ ](?:long|fast|slow|much)|the[ ](?:time|memory|speed))\b"
    r"|\ba[ ](?:half|third|quarter|fifth|tenth)[ ](?:of[ ](?:the[ ](?:time|memory)|a[ ]step)"
    r"|faster|slower|less|more)\b",
    re.IGNORECASE,
)
CELL = re.compile(rf"(?<=\|)[ ]*((?=[^|]*\d\d){NUMBER}(?:(?:,|[ ]to)[ ]?{NUMBER})*)[ ]*(?=\|)")


def quantities(text: str) -> list[tuple[int, str]]:
    """What looks measured, in the order of the page, each with the number of its line."""
    lines = [line.strip() for line in IGNORED.sub(_blank, text).split("\n")]
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    shown = " ".join(lines)
    found = {match.start(): match[0] for match in MEASURED.finditer(shown)}
    for match in CELL.finditer(shown):
        if not any(match.start(1) <= at < match.end(1) for at in found):
            found[match.start(1)] = match[1]
    return [(bisect.bisect_right(starts, at), what) for at, what in sorted(found.items())]


def _blank(found: re.Match[str]) -> str:
    """Return spaces, but of a number in quotes what is quoted."""
    quoted = found["quoted"] or ""
    if re.fullmatch(rf"{NUMBER}[ ]?(?:{UNIT})", quoted):
        return found[0].replace("`", " ")
    return re.sub(r"[^\n]", " ", found[0])
