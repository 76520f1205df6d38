{{/* Of both kinds of monitor, metadata and what is not of an endpoint. Take root and monitor. */}}
{{- define "warpwatch.monitor.metadata" -}}
name: {{ include "warpwatch.fullname" .root }}
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
{{- end }}

{{/* How a daemon is scraped, the same for both kinds of monitor. Takes root and monitor. */}}
{{- define "warpwatch.endpoint" -}}
{{- $values := .root.Values -}}
port: {{ ternary "warpwatch" "http" (eq $values.mode "sidecar") }}
path: /metrics
scheme: {{ .monitor.scheme | default (include "warpwatch.scheme" .root) }}
interval: {{ .monitor.interval }}
scrapeTimeout: {{ .monitor.scrapeTimeout }}
{{- if eq $values.mode "daemonset" }}
# The workload's namespace, pod and container are labels of series and stay what they are.
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
{{- with .monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
relabelings:
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
    action: replace
  - targetLabel: job
    replacement: warpwatch
    action: replace
  {{- if eq $values.mode "daemonset" }}
  # The pod's address is another one after each rollout, and its series would be others too.
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
    action: replace
  # Of the daemon's own pod, they would read as the workload's on series that have none.
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
