"""The report's style sheet. Contrast of text is at least 4.5 to 1 in both colour schemes."""

from __future__ import annotations

# By part: light, dark. What the step is for is blue, company violet, copies teal, losses warm.
COLOURS = {
    "compute": ("#2f6fde", "#4d8bf0"),
    "operators": ("#2f6fde", "#4d8bf0"),
    "matrix": ("#1f57bd", "#3f7de8"),
    "other_kernel": ("#7fabf2", "#8fb8f7"),
    "operator": ("#94a3b8", "#7b8ba5"),
    "collective": ("#8250df", "#a47af0"),
    "communication": ("#8250df", "#a47af0"),
    "rank_wait": ("#d63d8f", "#f06eb0"),
    "copies": ("#0f8f86", "#2bb8ad"),
    "transfer": ("#0f8f86", "#2bb8ad"),
    "data_loading": ("#e8590c", "#ff8a3d"),
    "host": ("#cf222e", "#ff6b63"),
    "dispatch": ("#e0a100", "#e9bd3f"),
    "launch": ("#f5cf47", "#ffe27a"),
    "synchronization": ("#a3195b", "#e0559a"),
    "copy": ("#3aa69b", "#6fd0c7"),
    "blocked": ("#b08cf0", "#c9b0f7"),
    "allocator": ("#8c5a2b", "#c08a55"),
    "gc": ("#4d7c0f", "#8fc043"),
    "compile": ("#0891b2", "#4cc4e0"),
    "checkpoint": ("#6b7a00", "#b9c94a"),
    "kernel_gap": ("#c3cad4", "#4a5361"),
    "unexplained": ("#8b95a3", "#7d8794"),
}
_LIGHT = (
    "--ink:#1a2029;--soft:#57606d;--page:#f5f6f8;--card:#fff;--line:#e0e4ea;--track:#edf0f4;"
    "--good:#17663d;--good-soft:#e3f4ea;--bad:#a51d2b;--bad-soft:#fdeced;--open:#7a4a00;"
    "--open-soft:#fcf1da;"
)
_DARK = (
    "--ink:#e6eaf0;--soft:#a3adbb;--page:#0e1116;--card:#171b22;--line:#2b323d;--track:#222832;"
    "--good:#6fd69c;--good-soft:#14301f;--bad:#ff9a9f;--bad-soft:#37191d;--open:#f0bb63;"
    "--open-soft:#33270f;"
)
_RULES = """
*{box-sizing:border-box;margin:0}
html{color-scheme:light dark}
body{margin:0 auto;max-width:1180px;padding:20px 16px 48px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere;
font-variant-numeric:tabular-nums}
h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;text-wrap:balance}
h2{font-size:15px;font-weight:650;margin:30px 0 8px}
h3{font-size:17px;font-weight:650}
ul{padding-left:20px}
code{font:.9em ui-monospace,Menlo,Consolas,monospace}
.soft{color:var(--soft);font-size:14px}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px}
.card+.card{margin-top:12px}
.verdict{border-radius:14px;padding:22px 24px;background:var(--tone-soft)}
.verdict h1,.verdict .kind{color:var(--tone)}
.verdict .lead{font-size:18px;margin-top:6px;max-width:75ch}
.todo{margin-top:16px;padding:14px 16px;border-radius:10px;background:var(--card);
border-left:5px solid var(--tone);max-width:90ch}
.todo b{display:block;color:var(--tone);font-size:13px;letter-spacing:.04em;
text-transform:uppercase}
.todo p{font-size:18px;font-weight:550}
.gain{margin-top:12px}
.big{font-size:18px}
.healthy{--tone:var(--good);--tone-soft:var(--good-soft)}
.inconclusive{--tone:var(--open);--tone-soft:var(--open-soft)}
.problem{--tone:var(--bad);--tone-soft:var(--bad-soft)}
b.problem{color:var(--bad)}
.card ul,.why{margin-top:8px}
.why{padding-left:20px}
.lane{display:grid;grid-template-columns:200px 1fr;gap:2px 12px;align-items:center;margin:5px 0;
font-size:13px}
.lane.blamed{outline:2px solid var(--bad);outline-offset:3px;border-radius:4px}
svg.row{display:block;width:100%;height:22px;background:var(--track);border-radius:3px}
.axis{display:flex;justify-content:space-between;color:var(--soft);font-size:12px;
margin-left:212px}
.legend{list-style:none;padding:0;margin-top:12px;display:flex;flex-wrap:wrap;gap:4px 16px;
font-size:13px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.bar-row{display:grid;grid-template-columns:200px 1fr 64px 84px;gap:4px 12px;align-items:center;
margin:5px 0;font-size:14px}
.bar-row b,.bar-row em{text-align:right;font-style:normal;font-weight:500}
.bar-row em,.bar-row.head{color:var(--soft)}
.bar-row.head{font-size:12px;margin:0}
.bar{height:14px;background:var(--track);border-radius:3px;overflow:hidden}
.bar i{display:block;height:100%;min-width:1px}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:8px 0}
summary{cursor:pointer;padding:10px 16px;font-weight:600}
summary:focus-visible,.scroll:focus-visible{outline:2px solid #2f6fde;outline-offset:2px}
.scroll{overflow-x:auto;padding:0 16px 12px}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:5px 14px 5px 0;border-top:1px solid var(--line);text-align:left;vertical-align:top}
th{border-top:0;color:var(--soft);font-weight:600;white-space:nowrap}
td:first-child{min-width:180px}
.n{text-align:right;white-space:nowrap}
footer{margin-top:28px}
@media (max-width:640px){
body{padding:12px 10px 32px}
h1{font-size:25px}
.verdict{padding:16px}
.lead,.verdict .lead,.todo p{font-size:16px}
.card{padding:12px}
.lane{grid-template-columns:1fr;margin:8px 0}
.axis{margin-left:0}
.bar-row{grid-template-columns:1fr 60px 76px;margin:8px 0}
.bar-row .bar,.bar-row.head span:nth-child(2){grid-column:1/-1;grid-row:2}
.bar-row.head span:nth-child(2){display:none}
}
@media print{details{break-inside:avoid}body{background:#fff}}
"""


def _variables(scheme: int) -> str:
    return "".join(f"--p-{label}:{both[scheme]};" for label, both in COLOURS.items())


def _fills() -> str:
    return "".join(
        f".p-{label}{{fill:var(--p-{label})}}.b-{label}{{background:var(--p-{label})}}"
        for label in COLOURS
    )


STYLE = (
    f":root{{{_LIGHT}{_variables(0)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}{_variables(1)}}}}}"
    f"{_RULES}{_fills()}"
)
