"""The report's pieces, each a function from numbers to HTML; ``html.render_html`` puts them
together.

- words: what kinds, parts and causes are called
- parts: a stretch of time as disjoint parts, which add up to it
- drawing: rows of coloured spans as SVG, few enough to stay small
- timeline: the longest step; bars: where time went; tables: the details
- style: the sheet, light and dark
"""
