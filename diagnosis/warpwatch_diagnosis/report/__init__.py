"""Renders the diagnosis: text for a terminal, html as a page.

- parts: a stretch of time as disjoint parts, which add up to it
- drawing: rows of coloured spans and bars; handover: the next tool's commands
"""
