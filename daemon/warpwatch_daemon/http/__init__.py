"""The daemon on the network: metrics, the JSON API and the web page.

- agent: what HTTP needs of the daemon
- server, listening, web_config, certificate: addresses, sockets, TLS
- guard, basic_auth: what every request passes before a route sees it
- access: who asks, and what they may read and change; peer, socket_owner: what the
  kernel knows of them
- metrics: the scrape; probes: a port of their own for probes; connection: time-outs of silent peers
- models: the documents of the JSON API; api: its answers; request_data: reading filters and bodies
- routes: what each operation takes and answers; app, openapi: the router and the document of them
- capture_files: traces and reports
- alertmanager: alerts that ask for captures
- page: the web page
"""
