"""The agent of one node, and the command line; `agent` composes the other packages."""
