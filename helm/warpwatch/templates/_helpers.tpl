{{- define "warpwatch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Short enough for what is put behind it: names have 63 characters. */}}
{{- define "warpwatch.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "warpwatch.selectorLabels" -}}
app.kubernetes.io/name: {{ include "warpwatch.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "warpwatch.labels" -}}
{{ include "warpwatch.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: warpwatch
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "warpwatch.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "warpwatch.serviceAccountName" -}}
{{- $made := ternary (include "warpwatch.fullname" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $made }}
{{- end }}

{{- define "warpwatch.configMapName" -}}
{{- .Values.existingConfigMap | default (include "warpwatch.fullname" .) }}
{{- end }}

{{/* Empty where there is none. */}}
{{- define "warpwatch.tokenSecretName" -}}
{{- $made := ternary (printf "%s-token" (include "warpwatch.fullname" .)) "" .Values.token.create -}}
{{- .Values.token.existingSecret | default $made }}
{{- end }}

{{- define "warpwatch.scheme" -}}
{{- ternary "https" "http" (not (empty .Values.tls.existingSecret)) }}
{{- end }}

{{/* What every container of ours may do: nothing. */}}
{{- define "warpwatch.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Liveness and readiness are the same: who cannot read NVML says so in metrics, and must neither be
restarted for it nor hold up a rollout. Only the port is looked at where a certificate is demanded that the
kubelet has not, or where a web-config.yml says what is not known here. */}}
{{- define "warpwatch.probe" -}}
{{- if or .Values.tls.clientAuth .Values.webConfig.existingSecret }}
tcpSocket:
  port: http
{{- else }}
httpGet:
  path: /healthz
  port: http
  scheme: {{ include "warpwatch.scheme" . | upper }}
{{- end }}
timeoutSeconds: 5
{{- end }}

{{/* What contradicts itself, told before anything is made. */}}
{{- define "warpwatch.check" -}}
{{- $http := .Values.config.http | default dict -}}
{{- range $key, $value := dict "listen" "address and port" "token_file" "token" "web_config" "tls or webConfig" -}}
{{- if hasKey $http $key -}}
{{- fail (printf "config.http.%s is the chart's own; set the value %s instead" $key $value) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.existingConfigMap .Values.config -}}
{{- fail "config and existingConfigMap exclude each other" -}}
{{- end -}}
{{- if and .Values.token.existingSecret .Values.token.create -}}
{{- fail "token.existingSecret and token.create exclude each other" -}}
{{- end -}}
{{- if and .Values.tls.existingSecret .Values.webConfig.existingSecret -}}
{{- fail "tls.existingSecret and webConfig.existingSecret exclude each other" -}}
{{- end -}}
{{- if and .Values.tls.clientAuth (not .Values.tls.existingSecret) -}}
{{- fail "tls.clientAuth needs tls.existingSecret" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- fail "podMonitor and serviceMonitor would scrape every pod twice; enable one of them" -}}
{{- end -}}
{{- if and .Values.nonRoot.enabled (or .Values.privileges.kernelLog .Values.privileges.profiling .Values.privileges.migMonitor) -}}
{{- fail "privileges.kernelLog, profiling and migMonitor need root; nonRoot.enabled excludes them" -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") (or .Values.tls.existingSecret .Values.webConfig.existingSecret (include "warpwatch.tokenSecretName" .)) -}}
{{- fail "a sidecar takes no token, tls or webConfig: Secrets do not leave their namespace; use mode daemonset" -}}
{{- end -}}
{{- if and .Values.grafana.tokenSecret (not .Values.grafana.url) -}}
{{- fail "grafana.tokenSecret needs grafana.url" -}}
{{- end -}}
{{- end }}

{{- define "warpwatch.peersHost" -}}
{{ include "warpwatch.fullname" . }}-peers.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "warpwatch.peersUrl" -}}
{{ include "warpwatch.scheme" . }}://{{ include "warpwatch.peersHost" . }}:{{ .Values.port }}
{{- end }}

{{/* Whether a daemon can hand an alert to another: with a token, and without a certificate of its own. */}}
{{- define "warpwatch.passesOn" -}}
{{- if and (include "warpwatch.tokenSecretName" .) (not .Values.tls.clientAuth) (not .Values.webConfig.existingSecret) -}}
true
{{- end -}}
{{- end }}

{{/* Any one of these says that a node has NVIDIA GPUs. */}}
{{- define "warpwatch.gpuNodes" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      # GPU feature discovery
      - matchExpressions:
          - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
      # Node feature discovery; 10de is NVIDIA
      - matchExpressions:
          - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
      # GKE
      - matchExpressions:
          - {key: cloud.google.com/gke-accelerator, operator: Exists}
      # EKS
      - matchExpressions:
          - {key: k8s.amazonaws.com/accelerator, operator: Exists}
      # AKS
      - matchExpressions:
          - {key: kubernetes.azure.com/accelerator, operator: In, values: [nvidia]}
{{- end }}
