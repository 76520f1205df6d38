{{/* Below the mount points: the daemon must own its folders, and those belong to the kubelet. */}}
{{- define "warpwatch.sidecar.folders" -}}
- name: WARPWATCH_DIR
  value: /run/warpwatch/pod
- name: WARPWATCH_INBOX
  value: /var/lib/warpwatch/inbox
{{- end }}

{{/* Not empty where there is a ConfigMap to mount. */}}
{{- define "warpwatch.sidecar.hasConfig" -}}
{{- .Values.existingConfigMap | default (ternary "true" "" (not (empty .Values.config))) }}
{{- end }}

{{/*
The daemon beside the training container: an init container that stays (Kubernetes 1.29), so that it is
there before the training begins and ends after it, and a Job is done when its training is. No readiness
probe: a pod that trains is ready whatever its watcher sees.
*/}}
{{- define "warpwatch.sidecar.container" -}}
{{- include "warpwatch.check" . }}
{{- if ne .Values.mode "sidecar" }}
{{- fail "warpwatch.sidecar.container needs mode sidecar, as the volumes are the sidecar's then" }}
{{- end }}
{{- if semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version }}
{{- fail "the sidecar needs Kubernetes 1.29 (init containers that stay); use mode daemonset" }}
{{- end -}}
- name: warpwatch
  image: {{ include "warpwatch.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args:
    - daemon
    {{- if include "warpwatch.sidecar.hasConfig" . }}
    - --config=/etc/warpwatch/warpwatch.yaml
    - --watch-config
    {{- end }}
    - --log-level={{ .Values.logLevel }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    - name: NODE_NAME
      valueFrom:
        fieldRef:
          fieldPath: spec.nodeName
    - name: WARPWATCH_HTTP__LISTEN
      value: {{ printf "%s:%v" .Values.address .Values.port | quote }}
    - name: WARPWATCH_HTTP__PROBE_LISTEN
      value: {{ printf "%s:%v" .Values.address .Values.probePort | quote }}
    {{- include "warpwatch.sidecar.folders" . | nindent 4 }}
    - name: WARPWATCH_ATTRIBUTION__KUBELET_SOCKET
      value: '"off"'
    - name: WARPWATCH_SOURCES__KERNEL_LOG__ENABLED
      value: "false"
    {{- if .Values.token.existingSecret }}
    - name: WARPWATCH_HTTP__TOKEN_FILE
      value: /etc/warpwatch-token/{{ .Values.token.key }}
    {{- end }}
    {{- if .Values.sidecar.gpus }}
    {{- with .Values.nvidia.visibleDevices }}
    - name: NVIDIA_VISIBLE_DEVICES
      value: {{ . | quote }}
    {{- end }}
    {{- with .Values.nvidia.driverCapabilities }}
    - name: NVIDIA_DRIVER_CAPABILITIES
      value: {{ . | quote }}
    {{- end }}
    {{- else }}
    - name: WARPWATCH_SOURCES__NVML__ENABLED
      value: "false"
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    # Not http: the training may have a port of that name.
    - name: warpwatch
      containerPort: {{ .Values.port }}
      protocol: TCP
    - name: ww-probes
      containerPort: {{ .Values.probePort }}
      protocol: TCP
  livenessProbe:
    httpGet:
      path: /healthz
      port: ww-probes
    initialDelaySeconds: 5
    periodSeconds: 20
    timeoutSeconds: 5
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ .Values.sidecar.uid }}
    seccompProfile:
      type: RuntimeDefault
    {{- include "warpwatch.securityContext" . | nindent 4 }}
  volumeMounts:
    - name: warpwatch-run
      mountPath: /run/warpwatch
    - name: warpwatch-data
      mountPath: /var/lib/warpwatch
    - name: warpwatch-tmp
      mountPath: /tmp
    {{- if include "warpwatch.sidecar.hasConfig" . }}
    - name: warpwatch-config
      mountPath: /etc/warpwatch
      readOnly: true
    {{- end }}
    {{- if .Values.token.existingSecret }}
    - name: warpwatch-token
      mountPath: /etc/warpwatch-token
      readOnly: true
    {{- end }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
