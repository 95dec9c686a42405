{{- /* Shared parts. Each takes (dict "root" $ "service" "reward"). */ -}}

{{- define "rollpacker.name" -}}
{{ .root.Release.Name | trunc 40 | trimSuffix "-" }}-{{ .service }}
{{- end }}

{{- define "rollpacker.selector" -}}
app.kubernetes.io/name: rollpacker
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- end }}

{{- define "rollpacker.labels" -}}
{{ include "rollpacker.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "rollpacker.claim" -}}
{{- $volume := index .root.Values.storage .volume -}}
{{ $volume.existingClaim | default (include "rollpacker.name" (dict "root" .root "service" .volume)) }}
{{- end }}

{{- define "rollpacker.image" -}}
image: {{ with .root.Values.image.registry }}{{ . }}/{{ end }}rollpacker-{{ .service }}:{{ .root.Values.image.tag }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "rollpacker.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    {{- if and (eq .service "reward") .root.Values.reward.seccompProfile }}
    type: Localhost
    localhostProfile: {{ .root.Values.reward.seccompProfile }}
    {{- else }}
    type: RuntimeDefault
    {{- end }}
  {{- if and (eq .service "reward") .root.Values.reward.appArmorProfile }}
  appArmorProfile:
    type: Localhost
    localhostProfile: {{ .root.Values.reward.appArmorProfile }}
  {{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with (index .root.Values .service).nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with (index .root.Values .service).tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "rollpacker.env" -}}
{{- $prefix := printf "ROLLPACKER_%s" (upper .service) }}
{{- range $name, $file := dict "CERTIFICATE_FILE" "tls.crt" "KEY_FILE" "tls.key" "CA_FILE" "ca.crt" "TOKEN_FILE" "token" "ACCEPTED_TOKENS_FILE" "accepted_tokens" }}
- {name: ROLLPACKER_SECURITY_{{ $name }}, value: /run/rollpacker/{{ $file }}}
{{- end }}
- {name: {{ $prefix }}_LOG_LEVEL, value: {{ .root.Values.logLevel | quote }}}
- {name: {{ $prefix }}_LOG_FORMAT, value: json}
- {name: {{ $prefix }}_METRICS_ADDRESS, value: "0.0.0.0:{{ .root.Values.metricsPort }}"}
{{- range $name, $value := (index .root.Values .service).environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "rollpacker.workerEnv" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: ROLLPACKER_{{ upper .service }}_COORDINATOR_ADDRESS, value: "{{ include "rollpacker.name" (dict "root" .root "service" "coordinator") }}:7777"}
{{- end }}

{{- define "rollpacker.redisUrl" -}}
- name: ROLLPACKER_{{ upper .service }}_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.redis.urlSecret }}, key: {{ .service }}}}
{{- end }}

{{- define "rollpacker.probes" -}}
startupProbe:
  exec: {command: {{ toJson .command }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 60
readinessProbe:
  exec: {command: {{ toJson .command }}}
  periodSeconds: 10
  timeoutSeconds: 10
livenessProbe:
  exec: {command: {{ toJson .command }}}
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 5
{{- end }}

{{- define "rollpacker.mounts" -}}
- {name: identity, mountPath: /run/rollpacker, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "rollpacker.volumes" -}}
- name: identity
  secret: {secretName: {{ index .root.Values.secrets .service }}, defaultMode: 0440}
- {name: tmp, emptyDir: {}}
{{- end }}
