"""The daemon on the network: metrics, the JSON API and the web page.

- backend: what HTTP needs of the daemon
- server, web_config: listening, TLS; app: the routes
- guard, limits, basic_auth: what every request passes before a route sees it
- access: who may change something or read the files of captures
- metrics: the scrape; connection: time-outs of silent peers
- api, documents, openapi: the JSON API; capture_files: traces and reports; bodies: of requests
- alertmanager: alerts that ask for captures; forwarding: to other nodes' daemons
- page: the web page
"""
