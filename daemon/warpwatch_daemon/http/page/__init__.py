"""The web page: server-rendered, one screen, no build step.

- endpoint: the answer to ``GET /`` and its content security policy
- headline: the one line on top
- findings, jobs, devices, captures: what each section shows
- minutes: what happened around an anomaly, as drawings
- charts: step times and phases as drawings
- templates: one file a section, with the style and the script that goes on refreshing

Everything that a training process says of itself is hostile: texts are cut, lists are bounded and
the templates escape.
"""
