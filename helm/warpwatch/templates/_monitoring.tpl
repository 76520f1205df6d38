{{/* The components to scrape, each with a monitor of its own: the fleet is no daemon of its node. */}}
{{- define "warpwatch.scraped" -}}
daemon{{ ternary " fleet" "" .Values.fleet.enabled }}
{{- end }}

{{/* Of both kinds of monitor, metadata and what is not of an endpoint. Take root, monitor and component. */}}
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

{{/* How a component is scraped, the same for both kinds of monitor. Takes root, monitor and component. */}}
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
  {{- if eq .component "fleet" }}
  # No node: the fleet's series name those that they are about.
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
  # The pod's address is another one after each rollout, and its series would be others too.
  - sourceLabels: [__meta_kubernetes_pod_{{ ternary "name" "node_name" (eq .component "fleet") }}]
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
