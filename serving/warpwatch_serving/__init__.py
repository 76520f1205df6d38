"""HTTP for agent and fleet: metrics, probes, the JSON API and the web page.

- backend: the interface that agent and fleet implement
- server: ports, the Unix socket, probes; connection: peers, their requests and limits
- access: permissions of requests, sessions, and the middleware around all routes
- web_config: TLS and passwords; routes: the operations, and `/openapi.json`
- api: the JSON API; bodies: its input; answers: its documents; metrics: the scrape
- page: the web page and the login
- config: the section ``http``
"""
