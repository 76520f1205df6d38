"""Turns records into anomalies: pure, without a clock and without input or output.

A record goes down one line, which engine.feed draws; each stage keeps a state of its own:

    record -> ranks             which ranks live, on which device; too many jobs
           -> job_steps         joins the ranks' steps into a step of the job
           -> detector_runner   shows both to the detectors, which return results
           -> anomalies         who took the cores, which fault explains it; then the register
                                opens, updates and closes anomalies
           -> changes

- detector: the base of detectors; detectors: the kinds of anomalies, and their registry
- signals: levels, noise and growth of series; budget: how many false alarms a kind may raise
- replay: a log of records through the same engine; runs: figures of runs, and their comparison
- config: the sections `detection` and `anomalies` of the configuration
"""
