{{/*
For training pods of other charts, which have this one as a dependency: an init container that brings the
shim, and what the training container needs. No image changes. With `mode: templates` this chart makes nothing
else: the DaemonSet is another release's. Each takes this chart's own context:

  initContainers:
    {{- include "warpwatch.shim.initContainer" .Subcharts.warpwatch | nindent 4 }}
  containers:
    - name: train
      env:
        {{- include "warpwatch.shim.env" .Subcharts.warpwatch | nindent 8 }}
      volumeMounts:
        {{- include "warpwatch.shim.volumeMounts" .Subcharts.warpwatch | nindent 8 }}
  volumes:
    {{- include "warpwatch.shim.volumes" .Subcharts.warpwatch | nindent 4 }}

In mode sidecar also: {{- include "warpwatch.sidecar.container" .Subcharts.warpwatch | nindent 4 }} behind the
init container, and the pod's label warpwatch/sidecar: "true", by which the PodMonitor finds it.
*/}}
{{- define "warpwatch.shim.initContainer" -}}
- name: warpwatch-shim
  image: {{ include "warpwatch.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [shim, /opt/warpwatch-shim]
  resources:
    {{- toYaml .Values.shim.resources | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    seccompProfile:
      type: RuntimeDefault
    {{- include "warpwatch.securityContext" . | nindent 4 }}
  volumeMounts:
    - name: warpwatch-shim
      mountPath: /opt/warpwatch-shim
{{- end }}

{{- define "warpwatch.shim.env" -}}
- name: WARPWATCH
  value: "1"
# Replaces the image's own PYTHONPATH, if it has one.
- name: PYTHONPATH
  value: /opt/warpwatch-shim/warpwatch/bootstrap
- name: WARPWATCH_POD_UID
  valueFrom:
    fieldRef:
      fieldPath: metadata.uid
{{- with .Values.shim.jobLabel }}
- name: WARPWATCH_POD_OWNER
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['{{ . }}']
{{- end }}
{{- if eq .Values.mode "sidecar" }}
{{ include "warpwatch.sidecar.folders" . }}
{{- else if .Values.nonRoot }}
# Named: the shim trusts a daemon of another user only there.
- name: WARPWATCH_DIR
  value: /run/warpwatch
- name: WARPWATCH_INBOX
  value: /var/lib/warpwatch/inbox
{{- end }}
{{- end }}

{{- define "warpwatch.shim.volumeMounts" -}}
- name: warpwatch-shim
  mountPath: /opt/warpwatch-shim
  readOnly: true
- name: warpwatch-run
  mountPath: /run/warpwatch
  {{- include "warpwatch.shim.subPath" . | nindent 2 }}
{{- if eq .Values.mode "sidecar" }}
- name: warpwatch-data
  mountPath: /var/lib/warpwatch
{{- else }}
- name: warpwatch-inbox
  mountPath: /var/lib/warpwatch/inbox
  {{- include "warpwatch.shim.subPath" . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A folder of the pod's own, which no other tenant sees. A daemon without root cannot work in those
that the kubelet makes. */}}
{{- define "warpwatch.shim.subPath" -}}
{{- if and (ne .Values.mode "sidecar") (not .Values.nonRoot) -}}
subPathExpr: $(WARPWATCH_POD_UID)
{{- end }}
{{- end }}

{{- define "warpwatch.shim.volumes" -}}
- name: warpwatch-shim
  emptyDir: {}
{{- if eq .Values.mode "sidecar" }}
# Memory: what a process writes there must never wait for a disk.
- name: warpwatch-run
  emptyDir:
    medium: Memory
    sizeLimit: 64Mi
- name: warpwatch-data
  emptyDir:
    sizeLimit: {{ .Values.sidecar.storeSize }}
{{- if include "warpwatch.sidecar.hasConfig" . }}
- name: warpwatch-config
  configMap:
    name: {{ include "warpwatch.configMapName" . }}
{{- end }}
{{- with .Values.token.existingSecret }}
- name: warpwatch-token
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
- name: warpwatch-tmp
  emptyDir:
    sizeLimit: {{ .Values.volumeSizes.tmp }}
{{- else }}
{{- $own := ternary "" "/pods" .Values.nonRoot }}
- name: warpwatch-run
  hostPath:
    path: {{ .Values.hostPaths.run }}{{ $own }}
    type: DirectoryOrCreate
- name: warpwatch-inbox
  hostPath:
    path: {{ .Values.hostPaths.data }}/inbox{{ $own }}
    type: DirectoryOrCreate
{{- end }}
{{- end }}
