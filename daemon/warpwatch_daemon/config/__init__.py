"""The configuration: typed, every default in one place, every key also an environment variable.

- sections: the whole, composed of the sections that other packages own and of the agent's own
- triggers: what may be captured by itself, and when not
- loading: one YAML file, then ``WARPWATCH_SECTION__KEY`` on top
- mistakes: what pydantic refuses, in the words of who writes YAML
"""
