"""The web page: server-rendered, one screen, no build step.

- endpoint: ``GET /`` and ``GET /run``, the login, and the content security policy
- templates: one file per section, which calls the module of its name, the style, and the script
  that refreshes the page
- selection: the part of the state that a search selects
- findings: the headline, anomalies, and agents that are not seen
- jobs, devices, captures, runs: the text of each section; charts: its drawings

Everything that a training process reports is hostile: lists are bounded, and templates cut and
escape all text.
"""
