"""Reads the configuration.

- loading: one YAML file, then ``WARPWATCH_SECTION__KEY`` on top
- mistakes: pydantic's errors in the terms of the YAML file
"""
