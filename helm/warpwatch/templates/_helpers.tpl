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

{{/* No version: a new chart with the same image restarts nothing. */}}
{{- define "warpwatch.podLabels" -}}
{{ include "warpwatch.selectorLabels" . }}
app.kubernetes.io/part-of: warpwatch
{{- with merge dict .Values.podLabels .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "warpwatch.labels" -}}
{{ include "warpwatch.selectorLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: warpwatch
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "warpwatch.image" -}}
{{- $registry := (.Values.global | default dict).imageRegistry | default .Values.image.registry -}}
{{- $image := ternary (printf "%s/%s" $registry .Values.image.repository) .Values.image.repository (not (empty $registry)) -}}
{{- if .Values.image.digest -}}
{{ $image }}@{{ .Values.image.digest }}
{{- else -}}
{{ $image }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "warpwatch.serviceAccountName" -}}
{{- $made := ternary (include "warpwatch.fullname" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $made }}
{{- end }}

{{- define "warpwatch.priorityClassName" -}}
{{- ternary (include "warpwatch.fullname" .) .Values.priorityClassName .Values.priorityClass.create -}}
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
restarted for it nor hold up a rollout. */}}
{{- define "warpwatch.probe" -}}
httpGet:
  path: /healthz
  port: probes
timeoutSeconds: 5
{{- end }}

{{/* What contradicts itself, reported before anything is made. */}}
{{- define "warpwatch.check" -}}
{{- include "warpwatch.check.config" . -}}
{{- include "warpwatch.check.access" . -}}
{{- include "warpwatch.check.mode" . -}}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- fail "podMonitor and serviceMonitor would scrape every pod twice; enable one of them" -}}
{{- end -}}
{{- if and .Values.nonRoot (or .Values.privileges.kernelLog .Values.privileges.profiling .Values.privileges.migMonitor) -}}
{{- fail "privileges.kernelLog, profiling and migMonitor need root; nonRoot excludes them" -}}
{{- end -}}
{{- if and .Values.networkPolicy.egress (not .Values.networkPolicy.restrictEgress) -}}
{{- fail "networkPolicy.egress adds to what restrictEgress lets out; set networkPolicy.restrictEgress" -}}
{{- end -}}
{{- include "warpwatch.check.tenantsPolicy" . -}}
{{- end }}

{{- define "warpwatch.check.config" -}}
{{- $config := .Values.config | default dict -}}
{{- range $key, $value := dict "listen" "address and port" "token_file" "token" "web_config" "tls or webConfig" -}}
{{- if hasKey ($config.http | default dict) $key -}}
{{- fail (printf "config.http.%s is the chart's own; set the value %s instead" $key $value) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.existingConfigMap $config -}}
{{- fail "config and existingConfigMap exclude each other" -}}
{{- end -}}
{{- end }}

{{- define "warpwatch.check.access" -}}
{{- range $name, $port := dict "port" .Values.port "fleet.port" (ternary .Values.fleet.port 0 .Values.fleet.enabled) -}}
{{- if eq (int $port) (int $.Values.probePort) -}}
{{- fail (printf "%s and probePort are both %v; one process cannot listen on it twice" $name $port) -}}
{{- end -}}
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
{{- if and ((.Values.config).http).metrics_token (not (include "warpwatch.tokenSecretName" .)) -}}
{{- fail "config.http.metrics_token needs token.create or token.existingSecret" -}}
{{- end -}}
{{- range $name := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := get $.Values $name -}}
{{- if and $.Values.tls.clientAuth $monitor.enabled (not $monitor.tlsConfig) -}}
{{- fail (printf "tls.clientAuth: Prometheus needs a certificate of its own; set %s.tlsConfig" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "warpwatch.check.mode" -}}
{{- if eq .Values.mode "sidecar" -}}
{{- if or .Values.tls.existingSecret .Values.webConfig.existingSecret .Values.token.create -}}
{{- fail "a sidecar takes no tls, webConfig or token.create: Secrets do not leave their namespace; token.existingSecret names one of the training's namespace" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.mode "templates" -}}
{{- range $name := list "podMonitor" "serviceMonitor" "prometheusRule" "dashboards" -}}
{{- if (get $.Values $name).enabled -}}
{{- fail (printf "mode templates makes no objects; %s.enabled belongs to the release with the DaemonSet" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "priorityClass" "token" -}}
{{- if (get $.Values $name).create -}}
{{- fail (printf "mode templates makes no objects; %s.create belongs to the release with the DaemonSet" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "warpwatch.check.tenantsPolicy" -}}
{{- if .Values.tenantsPolicy.enabled -}}
{{- if or (ne .Values.mode "daemonset") .Values.nonRoot -}}
{{- fail "tenantsPolicy is for the host folders that a daemon of root shares with trainings; mode sidecar or templates, and nonRoot, have none that it fits" -}}
{{- end -}}
{{- if semverCompare "<1.30.0-0" .Capabilities.KubeVersion.Version -}}
{{- fail "tenantsPolicy needs Kubernetes 1.30 (ValidatingAdmissionPolicy)" -}}
{{- end -}}
{{- range $other := .Values.tenantsPolicy.otherHostPaths -}}
{{- range $ours := list $.Values.hostPaths.run $.Values.hostPaths.data -}}
{{- if or (hasPrefix (printf "%s/" $other) (printf "%s/" $ours)) (hasPrefix (printf "%s/" $ours) (printf "%s/" $other)) -}}
{{- fail (printf "tenantsPolicy.otherHostPaths: %s would give tenants more of %s than their own part" $other $ours) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "warpwatch.check.fleet" -}}
{{- if and (gt (int .Values.fleet.workers) 1) (not (((.Values.config).bus).url)) -}}
{{- fail "fleet.workers of more than 1 share the jobs on a bus: set config.bus.url" -}}
{{- end -}}
{{- if ne .Values.mode "daemonset" -}}
{{- fail "fleet.enabled needs mode daemonset: it follows the daemons of its release" -}}
{{- end -}}
{{/* A token, which TLS hides or which may be seen, and no certificate of the fleet's own. */}}
{{- if not (and (include "warpwatch.tokenSecretName" .) (not .Values.tls.clientAuth) (not .Values.webConfig.existingSecret) (or .Values.tls.existingSecret .Values.token.allowPlainPeers)) -}}
{{- fail "fleet.enabled needs the daemons' token (token.create or token.existingSecret), and tls.existingSecret without clientAuth, or token.allowPlainPeers" -}}
{{- end -}}
{{- end }}

{{- define "warpwatch.check.kubernetes" -}}
{{- $own := .Values.fleet.kubernetes -}}
{{- if and $own.taints (not $own.conditions) -}}
{{- fail "fleet.kubernetes.taints follow the condition GpuHealthy; set fleet.kubernetes.conditions" -}}
{{- end -}}
{{- if $own.injection.enabled -}}
{{- if and .Values.nonRoot (not .Values.nonRootUser.sharedFolders) -}}
{{- fail "fleet.kubernetes.injection needs host folders that pods share with the daemon; nonRoot without sharedFolders has none" -}}
{{- end -}}
{{- if and $own.injection.existingSecret (not $own.injection.caBundle) (not $own.injection.annotations) -}}
{{- fail "fleet.kubernetes.injection.existingSecret needs caBundle, or the annotation of cert-manager by which it is put in" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Not empty where the fleet asks the API server. */}}
{{- define "warpwatch.fleet.asks" -}}
{{- with .Values.fleet.kubernetes }}{{ ternary "true" "" (or .events .conditions .captures) }}{{ end -}}
{{- end }}

{{/* Not empty where a policy can be of any use. */}}
{{- define "warpwatch.networkPolicy" -}}
{{- if and .Values.networkPolicy.enabled (eq .Values.mode "daemonset") (not .Values.privileges.hostNetwork) -}}
true
{{- end -}}
{{- end }}

{{- define "warpwatch.peersHost" -}}
{{ include "warpwatch.fullname" . }}-peers.{{ .Release.Namespace }}.svc
{{- end }}

{{/* What the certificate is of. */}}
{{- define "warpwatch.serverName" -}}
{{- .Values.tls.serverName | default (include "warpwatch.peersHost" .) }}
{{- end }}

{{- define "warpwatch.peersUrl" -}}
{{ include "warpwatch.scheme" . }}://{{ include "warpwatch.peersHost" . }}:{{ .Values.port }}
{{- end }}

{{/* GPU operator says so while it must have the driver for itself; a node without the label is not paused. */}}
{{- define "warpwatch.notPaused" -}}
{key: nvidia.com/gpu.deploy.dcgm-exporter, operator: NotIn, values: [paused-for-driver-upgrade, paused-for-mig-change]}
{{- end }}

{{/* Any one of these says that a node has NVIDIA GPUs. */}}
{{- define "warpwatch.nodes" -}}
{{- $paused := include "warpwatch.notPaused" . -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- if .Values.gpuNodesOnly }}
      # GPU feature discovery
      - matchExpressions:
          - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
          - {{ $paused }}
      # Node feature discovery; 10de is NVIDIA
      - matchExpressions:
          - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
          - {{ $paused }}
      # GKE
      - matchExpressions:
          - {key: cloud.google.com/gke-accelerator, operator: Exists}
          - {{ $paused }}
      # EKS
      - matchExpressions:
          - {key: k8s.amazonaws.com/accelerator, operator: Exists}
          - {{ $paused }}
      # AKS
      - matchExpressions:
          - {key: kubernetes.azure.com/accelerator, operator: In, values: [nvidia]}
          - {{ $paused }}
      {{- else }}
      - matchExpressions:
          - {{ $paused }}
      {{- end }}
{{- end }}
