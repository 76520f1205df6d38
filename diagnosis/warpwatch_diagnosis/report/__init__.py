"""Renders the diagnosis: text for a terminal, html as a page.

- words: the titles of kinds, parts and causes
- parts: a stretch of time as disjoint parts, which add up to it
- drawing: rows of coloured spans as SVG, few enough to stay small
- timeline: the longest step; tables: the details
"""
