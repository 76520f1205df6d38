"""HTTP for agent and fleet: metrics, probes, the JSON API and the web page.

- backend: the interface that agent and fleet implement
- server, listening: ports, the Unix socket, probes; connection: requests and their limits
- access: permissions of requests; sessions: links and cookies; web_config: TLS and passwords
- guard: the middleware around all routes; routes: the operations, and `/openapi.json`
- api: the JSON API; bodies: its input; answers: its documents; metrics: the scrape
- page: the web page and the login
- config: the section ``http``
"""
