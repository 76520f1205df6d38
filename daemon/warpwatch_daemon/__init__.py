"""The agent: sources → state → detectors → captures → HTTP, and the command line."""
