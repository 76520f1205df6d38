{{/* The components to scrape, each with its own monitor: the fleet is not a daemon of its node. */}}
{{- define "warpwatch.scraped" -}}
daemon{{ ternary " fleet" "" .Values.fleet.enabled }}
{{- end }}

{{/* The metadata of both kinds of monitor, and their spec without endpoints. Take root, monitor and component. */}}
{{- define "warpwatch.monitor.metadata" -}}
name: {{ include "warpwatch.fullname" .root }}{{ ternary "-fleet" "" (eq .component "fleet") }}
namespace: {{ .monitor.namespace | default .root.Release.Namespace }}
labels:
  {{- include "warpwatch.labels" .root | nindent 2 }}
  {{- with .monitor.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .monitor.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "warpwatch.monitor.spec" -}}
{{- if eq .root.Values.mode "sidecar" }}
namespaceSelector: {any: true}
{{- else if .monitor.namespace }}
namespaceSelector: {matchNames: [{{ .root.Release.Namespace }}]}
{{- end }}
{{- with .monitor.attachMetadata }}
attachMetadata: {{ toJson . }}
{{- end }}
{{- with .monitor.sampleLimit }}
sampleLimit: {{ . }}
{{- end }}
selector:
  matchLabels:
    {{- if eq .root.Values.mode "sidecar" }}
    warpwatch/sidecar: "true"
    {{- else }}
    {{- include "warpwatch.selectorLabels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- end }}
{{- end }}

{{/* The endpoint of a component, for both kinds of monitor. Takes root, monitor and component. */}}
{{- define "warpwatch.endpoint" -}}
{{- $values := .root.Values -}}
port: {{ ternary "warpwatch" "http" (eq $values.mode "sidecar") }}
path: /metrics
scheme: {{ .monitor.scheme | default (include "warpwatch.scheme" .root) }}
interval: {{ .monitor.interval }}
scrapeTimeout: {{ .monitor.scrapeTimeout }}
{{- if eq $values.mode "daemonset" }}
# Series keep the namespace, pod and container of their workload.
honorLabels: true
{{- end }}
{{- if .monitor.tlsConfig }}
tlsConfig:
  {{- toYaml .monitor.tlsConfig | nindent 2 }}
{{- else if $values.tls.existingSecret }}
tlsConfig:
  serverName: {{ include "warpwatch.serverName" .root }}
  ca:
    secret:
      name: {{ $values.tls.existingSecret }}
      key: ca.crt
{{- end }}
{{- if .monitor.basicAuth }}
basicAuth:
  {{- toYaml .monitor.basicAuth | nindent 2 }}
{{- else if or ($values.config.http | default dict).metrics_token (and (eq .component "fleet") ($values.config.fleet | default dict).metrics_token) }}
# Prometheus reads the Secret from the monitor's namespace.
authorization:
  credentials:
    name: {{ include "warpwatch.tokenSecretName" .root }}
    key: {{ $values.token.key }}
{{- end }}
relabelings:
  {{- if eq .component "fleet" }}
  # The fleet's series carry the nodes that they describe.
  - targetLabel: job
    replacement: warpwatch-fleet
    action: replace
  {{- else }}
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
    action: replace
  - targetLabel: job
    replacement: warpwatch
    action: replace
  {{- end }}
  {{- if eq $values.mode "daemonset" }}
  # The pod's address changes with each rollout, which would start new series.
  - sourceLabels: [__meta_kubernetes_pod_{{ ternary "name" "node_name" (eq .component "fleet") }}]
    targetLabel: instance
    action: replace
  # These labels of the daemon's own pod would pass for the workload's on series without one.
  - regex: namespace|pod|container|endpoint|service
    action: labeldrop
  {{- end }}
  {{- with .monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
