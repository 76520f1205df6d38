"""The web page: server-rendered, one screen, no build step.

- endpoint: the answers to ``GET /`` and ``GET /run`` and its content security policy
- templates: one file a section, with the style and the script that goes on refreshing; each asks
  the module of its name
- headline: the one line on top
- agents: those that a fleet does not see
- selection: the part of the state that a search selects
- job_order: jobs, the worst first, each with a sentence
- findings, jobs, devices, captures, runs: what each section says of a record
- minutes: what happened around an anomaly, as drawings
- charts: step times and phases as drawings

Everything that a training process says of itself is hostile: lists are bounded, and whatever a
template prints is cut and escaped.
"""
