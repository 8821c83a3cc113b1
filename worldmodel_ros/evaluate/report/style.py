"""The style sheet of the report: calm, one column, light or dark like the reader's system."""
from __future__ import annotations

CSS = """
:root { color-scheme: light dark;
  --paper: #ffffff; --card: #f6f7f9; --ink: #1f2933; --muted: #5f6b78; --line: #dde2e8; --grid: #eceff2;
  --a: #2563eb; --b: #c2570c; --truth: #0f766e; --copy: #8a94a0; --good: #15803d; --fair: #a16207; --bad: #c81e1e;
  --two: #2563eb; --one: #60a5fa; --plan: #eab308; --last: #d97706; --stop: #dc2626; --none: #7f1d1d; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181d; --card: #1c2229; --ink: #e4e8ec; --muted: #98a3af; --line: #323b45; --grid: #262e37;
  --a: #6ea2ff; --b: #f2994a; --truth: #3fbfae; --copy: #7d8894; --good: #4ac47b; --fair: #e0b03b; --bad: #f87171;
  --two: #5b93f7; --one: #a5c8fd; --plan: #facc15; --last: #f2a33a; --stop: #f06464; --none: #b94a4a; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 3.2rem; -webkit-text-size-adjust: 100%; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main, header, footer, nav ol { max-width: 61rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.6rem; padding-bottom: 1.6rem; }
h1 { font-size: clamp(1.45rem, 1.1rem + 1.7vw, 2.1rem); line-height: 1.25; font-weight: 650; letter-spacing: -.012em;
  margin: .5rem 0 1rem; text-wrap: balance; }
h2 { font-size: 1.3rem; font-weight: 650; letter-spacing: -.005em; margin: 0 0 .3rem; }
h3 { font-size: 1rem; font-weight: 650; margin: 1.9rem 0 .3rem; }
p { margin: .45rem 0; max-width: 46rem; }
a { color: var(--a); }
small, .lead, .facts, figcaption, caption { color: var(--muted); }
.eyebrow { font-size: .82rem; color: var(--muted); margin: 0; letter-spacing: .01em; }
.badge { display: inline-block; padding: .06rem .6rem; border-radius: 1rem; font-size: .82rem; font-weight: 600;
  border: 1.5px solid currentColor; margin-right: .45rem; }
.badge.good, .sev-info { color: var(--good); } .badge.fair, .sev-warning { color: var(--fair); }
.badge.bad, .sev-error { color: var(--bad); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .92rem;
  margin: 1.2rem 0 0; }
.facts dt { font-weight: 600; } .facts dd { margin: 0; overflow-wrap: anywhere; }
nav { position: sticky; top: 0; z-index: 2; background: var(--paper); border-block: 1px solid var(--line); }
nav ol { display: flex; gap: 1.35rem; list-style: none; overflow-x: auto; padding-top: .55rem; padding-bottom: .55rem;
  font-size: .92rem; scrollbar-width: none; }
nav a { color: var(--ink); text-decoration: none; white-space: nowrap; } nav a:hover { color: var(--a); }
section { padding: 2.3rem 0 .4rem; } section + section { border-top: 1px solid var(--line); margin-top: 1.8rem; }
.tiles { display: grid; grid-template-columns: repeat(2, 1fr); gap: .7rem; margin: 1.8rem 0 0; }
@media (min-width: 40rem) { .tiles { grid-template-columns: repeat(3, 1fr); } }
@media (min-width: 62rem) { .tiles { grid-template-columns: repeat(6, 1fr); } }
.tile { background: var(--card); border-radius: .7rem; padding: .75rem .85rem .7rem; text-decoration: none;
  color: inherit; }
.tile b { display: block; font-size: 1.5rem; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums;
  letter-spacing: -.01em; }
.tile span { display: block; font-size: .86rem; }
.tile small { display: block; font-size: .78rem; line-height: 1.35; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: .4rem 1.6rem; }
.scroll { overflow-x: auto; }
figure { margin: 1rem 0 1.5rem; } figcaption { font-size: .88rem; margin-bottom: .45rem; max-width: 46rem; }
figcaption b { color: var(--ink); }
.film { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 8.2rem)); gap: .4rem .45rem; }
.film figure { margin: 0; font-size: .76rem; line-height: 1.3; text-align: center; color: var(--muted); min-width: 0; }
.film img { display: block; width: 100%; height: auto; image-rendering: pixelated; border-radius: .25rem;
  background: var(--card); }
.film .row { grid-column: 1 / -1; font-size: .82rem; line-height: 1.35; font-weight: 600; margin: .3rem 0 -.2rem; }
.film .row small { font-weight: 400; }
@media (min-width: 58rem) {
  .film { grid-template-columns: 9.8rem repeat(var(--columns), minmax(0, 8.2rem)); }
  .film .row { grid-column: 1; margin: .2rem .6rem 0 0; } .film .row small { display: block; } }
.film .truth img { outline: 2px solid var(--truth); outline-offset: -2px; }
.film .best img { outline: 2px solid var(--a); outline-offset: -2px; }
.film .empty { visibility: hidden; }
.moment { border-radius: .7rem; padding: .9rem 1rem .6rem; margin: 1rem 0; background: var(--card); }
.moment:target { box-shadow: 0 0 0 2px var(--a); } .moment h3 { margin: 0 0 .2rem; }
.moment .back { float: right; font-size: .84rem; text-decoration: none; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .8rem 0 1.1rem; }
caption { text-align: left; padding-bottom: .3rem; font-size: .88rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap;
  vertical-align: baseline; }
thead th { color: var(--muted); font-weight: 600; border-bottom-color: var(--line); }
th:first-child { text-align: left; font-weight: 500; white-space: normal; min-width: 9rem; }
td small { display: block; line-height: 1.25; }
td b.a { color: var(--a); } td b.b { color: var(--b); }
td.text { text-align: left; white-space: normal; }
.findings { list-style: none; padding: 0; }
.findings li { padding: .5rem 0; border-bottom: 1px solid var(--grid); max-width: 50rem; }
.findings b { margin-right: .4rem; }
svg.plot { display: block; width: 100%; height: auto; max-width: 34rem; }
svg.plot.wide { min-width: 40rem; max-width: none; }
svg text { font-size: 11px; fill: var(--muted); } svg .axis-label { font-size: 11px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--line); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .line.thin { stroke-width: 1.1; }
svg .band { opacity: .16; stroke: none; } svg .rule { stroke: var(--muted); stroke-dasharray: 3 3; }
svg .rule.limit { stroke: var(--bad); stroke-dasharray: none; } svg .note { font-size: 10.5px; }
svg .note.limit { fill: var(--bad); }
svg .rule.episode { stroke: var(--line); stroke-dasharray: none; }
svg .line.a { stroke: var(--a); } svg .band.a, svg .dot.a { fill: var(--a); }
svg .line.b { stroke: var(--b); } svg .band.b, svg .dot.b { fill: var(--b); }
svg .line.copy { stroke: var(--copy); stroke-dasharray: 5 3; } svg .band.copy, svg .dot.copy { fill: var(--copy); }
svg .line.truth { stroke: var(--truth); } svg .dot.truth { fill: var(--truth); }
svg .mark circle { fill: var(--muted); } svg .mark.outlier circle { fill: var(--bad); }
svg .mark text { fill: var(--paper); font-weight: 700; } svg .mark:hover circle { fill: var(--ink); }
.two_step { --c: var(--two); } .one_step { --c: var(--one); } .plan_only { --c: var(--plan); }
.last_plan { --c: var(--last); } .stop { --c: var(--stop); }
.none { --c: var(--none); } svg .bar { fill: var(--c, var(--muted)); }
.shares { display: flex; height: 1.15rem; border-radius: .35rem; overflow: hidden; margin: .8rem 0 .4rem;
  max-width: 46rem; }
.shares span { background: var(--c); min-width: 2px; }
.legend { font-size: .86rem; color: var(--muted); display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .4rem 0; }
.key { display: inline-block; width: 1.15rem; height: 3px; vertical-align: middle; margin-right: .4rem;
  background: var(--c, var(--muted)); }
.key.a { --c: var(--a); } .key.b { --c: var(--b); } .key.truth { --c: var(--truth); }
.key.copy { --c: var(--copy); }
.key.two_step, .key.one_step, .key.plan_only, .key.last_plan, .key.stop, .key.none {
  height: .7rem; width: .7rem; border-radius: .15rem; }
footer { padding-top: 2rem; padding-bottom: 3rem; font-size: .86rem; color: var(--muted); }
code { font: .88em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
@media print { nav { position: static; } .moment, figure { break-inside: avoid; } }
""".strip()
