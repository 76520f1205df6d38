"""The daemon on the network: metrics, the JSON API and the web page.

- backend: what HTTP needs of the daemon
- server, web_config: listening, TLS; app: the routes
- guard, limits, basic_auth: what every request passes before a route sees it
- access: who may change something or read the files of captures
- api, documents, openapi: the JSON API; metrics: the scrape; capture_files: traces and reports
- page: the web page
"""
