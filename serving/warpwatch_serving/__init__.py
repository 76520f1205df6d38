"""HTTP for agent and fleet: metrics, probes, the JSON API and the web page.

- watcher: the interface that agent and fleet implement
- server, listening, web_config, certificate: addresses, sockets, TLS
- guard, basic_auth: limits and passwords, checked before a route runs
- access: permissions of a request; peer, socket_owner: the user at the other end of a connection
- metrics: the scrape; probes: a port for probes only; connection: time-outs of silent peers
- models: the documents of the JSON API; api: its answers; bodies, request_data: its input
- routes: the table of operations; app, openapi: the router and the document made of it
- capture_files: traces and reports
- alert_webhook, alertmanager: alerts that request captures
- page: the web page
- config: the section ``http``
"""
