"""The configuration of the agent.

- sections: the sections of other packages, composed with the agent's own
"""
