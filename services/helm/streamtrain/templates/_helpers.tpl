{{- define "streamtrain.labels" -}}
{{ include "streamtrain.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "streamtrain.selector" -}}
app.kubernetes.io/name: streamtrain
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "streamtrain.match" }}{{ include "streamtrain.selector" . | fromYaml | toJson }}{{ end }}

{{/* Metadata of an object: (dict "root" $ "component" "worker" "name" "…"). */}}
{{- define "streamtrain.metadata" -}}
name: {{ with .fullname }}{{ . }}{{ else }}{{ .root.Release.Name }}{{ with .name | default .component }}-{{ . }}{{ end }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "streamtrain.labels" . | nindent 2 }}
{{- end }}

{{/* Addresses of the first (place 0) or the second process (place 1) of all shards. */}}
{{- define "streamtrain.addresses" -}}
{{- $addresses := list }}
{{- range $index := until (int .root.Values.shards.count) }}
{{- $addresses = append $addresses (printf "%[1]s-shard-%[2]d-%[3]d.%[1]s-shards.%[4]s.svc:2222" $.root.Release.Name $index $.place $.root.Release.Namespace) }}
{{- end }}
{{- join "," $addresses }}
{{- end }}

{{/* The settings as variables: those of the values, and over them those that the chart decides. */}}
{{- define "streamtrain.settings" -}}
{{- $env := dict "STREAMTRAIN_MODEL" .Values.model.name "STREAMTRAIN_LOG__FORMAT" "json" }}
{{- range $group, $of := .Values.settings }}
{{- range $key, $value := $of }}
{{- $text := toJson $value }}
{{- if kindIs "slice" $value }}{{ $text = join "," $value }}{{ else if kindIs "string" $value }}{{ $text = $value }}{{ end }}
{{- if not (or (kindIs "invalid" $value) (eq $text "")) }}
{{- $_ := set $env (printf "STREAMTRAIN_%s__%s" (upper $group) (upper $key)) $text }}
{{- end }}
{{- end }}
{{- end }}
{{- $host := .Values.listenHost }}
{{- range $group, $port := dict "ps" 2222 "coordinator" 2220 "serve" 8501 }}
{{- $_ := set $env (printf "STREAMTRAIN_%s__LISTEN" (upper $group)) (printf "%s:%d" $host $port) }}
{{- end }}
{{- range $group := list "ps" "coordinator" "worker" "join" "serve" }}
{{- $_ := set $env (printf "STREAMTRAIN_%s__METRICS" (upper $group)) (printf "%s:9100" $host) }}
{{- end }}
{{- $_ := set $env "STREAMTRAIN_SERVE__GRPC_LISTEN" (printf "%s:8500" $host) }}
{{- $_ := set $env "STREAMTRAIN_PS__ADDRESSES" (include "streamtrain.addresses" (dict "root" . "place" 0)) }}
{{- if .Values.shards.backups }}{{ $_ := set $env "STREAMTRAIN_PS__BACKUPS" (include "streamtrain.addresses" (dict "root" . "place" 1)) }}{{ end }}
{{- $_ := set $env "STREAMTRAIN_COORDINATOR__ADDRESS" (printf "%s-coordinator.%s.svc:2220" .Release.Name .Release.Namespace) }}
{{- if include "streamtrain.claim" . }}{{ $_ := set $env "STREAMTRAIN_CHECKPOINT__URL" "/checkpoints" }}{{ end }}
{{- if .Values.tls }}
{{- range $key, $file := dict "CERTIFICATE" "tls.crt" "KEY" "tls.key" "CA" "ca.crt" }}{{ $_ := set $env (printf "STREAMTRAIN_SECURITY__%s" $key) (printf "/tls/%s" $file) }}{{ end }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{/* The claim of checkpoints, if they are in a volume. */}}
{{- define "streamtrain.claim" -}}
{{- if .Values.checkpoints.claim }}{{ .Values.checkpoints.claim }}{{ else if .Values.checkpoints.size }}{{ .Release.Name }}-checkpoints{{ end }}
{{- end }}

{{- define "streamtrain.model" -}}
{{- $files := .Values.model.files }}
{{- if .Values.demo.enabled }}{{ $files = dict "flights.py" (.Files.Get "files/flights.py") }}{{ end }}
{{- with $files }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* A pod: (dict "root" $ "component" "worker" "values" .Values.workers "command" (list …) "ports" (dict …)), and what is
said where it is used: "model": it needs the model; "checkpoints": it mounts them; "slim": it needs no TensorFlow; "probed":
name of the port of probes; "spread": DoNotSchedule, if not more of its pods may be on one node than on others; "grace": seconds to end in; "pause": seconds in which others learn that it ends. */}}
{{- define "streamtrain.pod" -}}
{{- mergeOverwrite (include "streamtrain.pod.made" . | fromYaml) (dict "spec" .values.pod) | toYaml }}
{{- end }}

{{- define "streamtrain.pod.made" -}}
{{- $values := .root.Values }}
{{- $claim := and .checkpoints (include "streamtrain.claim" .root) }}
{{- $model := and .model (include "streamtrain.model" .root) }}
{{- $git := and .model $values.model.git.repository }}
metadata:
  labels: {{- mergeOverwrite (include "streamtrain.labels" . | fromYaml) (.labels | default dict) | toYaml | nindent 4 }}
  annotations:
    checksum/settings: {{ include "streamtrain.settings" .root | sha256sum }}
    {{- with $model }}
    checksum/model: {{ sha256sum . }}
    {{- end }}
spec:
  serviceAccountName: {{ $values.serviceAccount.name | default .root.Release.Name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace | default 60 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
  {{- with .affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- else }}
  topologySpreadConstraints:
    {{- range $key, $unless := dict "topology.kubernetes.io/zone" "ScheduleAnyway" "kubernetes.io/hostname" (.spread | default "ScheduleAnyway") }}
    - topologyKey: {{ $key }}
      maxSkew: 1
      whenUnsatisfiable: {{ $unless }}
      nodeTaintsPolicy: Honor # a lost node does not count
      matchLabelKeys: [pod-template-hash] # nor do pods that are being replaced
      labelSelector: {matchLabels: {{ include "streamtrain.match" $ }}}
    {{- end }}
  {{- end }}
  tolerations:
    {{- range list "not-ready" "unreachable" }}
    - {key: node.kubernetes.io/{{ . }}, operator: Exists, effect: NoExecute, tolerationSeconds: {{ $values.unreachableSeconds }}}
    {{- end }}
  {{- with $git }}
  initContainers:
    - name: git
      image: {{ $values.model.git.image }}
      command: [sh, -c]
      args: ['git -c credential.helper="store --file /git/.git-credentials" clone --depth 1 --branch "$REF" "$REPOSITORY" /model']
      env:
        - {name: HOME, value: /tmp}
        - {name: REPOSITORY, value: {{ . | quote }}}
        - {name: REF, value: {{ $values.model.git.ref | quote }}}
      resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 128Mi}}
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: model, mountPath: /model}
        {{- if $values.model.git.secret }}
        - {name: git, mountPath: /git, readOnly: true}
        {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ and .slim $values.image.slim | default $values.image.repository }}:{{ $values.image.tag | default .root.Chart.AppVersion }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: {{- toYaml .command | nindent 8 }}
      envFrom:
        - configMapRef: {name: {{ .root.Release.Name }}-settings}
        - secretRef: {name: {{ $values.secret }}}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      startupProbe: {httpGet: {path: /healthz/live, port: {{ .probed | default "metrics" }}}, periodSeconds: 2, timeoutSeconds: 5, failureThreshold: 150}
      livenessProbe: {httpGet: {path: /healthz/live, port: {{ .probed | default "metrics" }}}, periodSeconds: 10, timeoutSeconds: 10, failureThreshold: 6}
      readinessProbe: {httpGet: {path: /healthz/ready, port: {{ .probed | default "metrics" }}}, periodSeconds: 2, timeoutSeconds: 5}
      {{- with .pause }}
      lifecycle: {preStop: {exec: {command: [sleep, {{ . | quote }}]}}}
      {{- end }}
      resources: {{- toYaml .values.resources | nindent 8 }}
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if or $model $git (and .model $values.model.configMap) }}
        - {name: model, mountPath: /model, readOnly: true}
        {{- end }}
        {{- if $claim }}
        - {name: checkpoints, mountPath: /checkpoints}
        {{- end }}
        {{- if $values.tls }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
  volumes:
    {{- $disk := .values.disk | default dict }}
    - name: tmp
      {{- if $disk.size }}
      ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], {{ with $disk.storageClass }}storageClassName: {{ . }}, {{ end }}resources: {requests: {storage: {{ $disk.size }}}}}}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- if $git }}
    - {name: model, emptyDir: {}}
    {{- with $values.model.git.secret }}
    - {name: git, secret: {secretName: {{ . }}}}
    {{- end }}
    {{- else if or $model (and .model $values.model.configMap) }}
    - {name: model, configMap: {name: {{ $values.model.configMap | default (printf "%s-model" .root.Release.Name) }}}}
    {{- end }}
    {{- with $claim }}
    - {name: checkpoints, persistentVolumeClaim: {claimName: {{ . }}}}
    {{- end }}
    {{- with $values.tls }}
    - {name: tls, secret: {secretName: {{ . }}}}
    {{- end }}
{{- end }}
