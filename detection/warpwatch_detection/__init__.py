"""Turns records into anomalies: pure, without a clock and without input or output.

A record passes the stages of engine.feed, each of which keeps a state of its own:

    record -> ranks       which ranks live, on which device; too many jobs
           -> job_steps   joins the ranks' steps into a step of the job
           -> detectors   turn records and joined steps into results
           -> anomalies   which processes took the cores, which fault explains it; then the register
                          opens, updates and closes anomalies
           -> changes

- detector: the base of detectors, their budget of false alarms, and their runner
- detectors: the kinds of anomalies, and their registry; signals: levels, noise, growth of series
- replay: a log of records through the same engine; runs: the figures of runs, and comparisons
- config: the sections `detection` and `anomalies` of the configuration
"""
