{{- define "streamtrain.publisher" -}}
streamtrain-publisher-{{ printf "%s %s" .Values.settings.publish.url .Values.settings.publish.model | sha256sum | trunc 16 }}
{{- end }}

{{/* What cannot work is refused before anything is changed. */}}
{{- define "streamtrain.check" -}}
{{- $values := .Values }}
{{- range $key := list "stream.url" "stream.topic" "publish.model" }}
{{- $parts := splitList "." $key }}
{{- if not (get (get $values.settings (first $parts)) (last $parts)) }}{{ fail (printf "settings.%s is not set" $key) }}{{ end }}
{{- end }}
{{- if not $values.secret }}
{{- fail "secret is not set: kubectl create secret generic streamtrain --from-literal=STREAMTRAIN_SECURITY__TOKEN=$(openssl rand -hex 24), and --set secret=streamtrain" }}
{{- end }}
{{- if not (or $values.tls ($values.settings.security | default dict).insecure) }}
{{- fail "tls is not set: it names a Secret with tls.crt, tls.key and ca.crt; or set settings.security.insecure=true, if plaintext may leave a node" }}
{{- end }}
{{- $kept := include "streamtrain.claim" . }}
{{- if not (or $kept $values.settings.checkpoint.url) }}
{{- fail "settings.checkpoint.url is not set: name a bucket, or set checkpoints.claim or checkpoints.size; without checkpoints, what shards have learned is lost with them" }}
{{- end }}
{{- if and $kept $values.settings.checkpoint.url }}
{{- fail "settings.checkpoint.url and a volume of checkpoints are both set: choose one" }}
{{- end }}
{{- if gt (len (compact (list (include "streamtrain.model" .) $values.model.configMap $values.model.git.repository))) 1 }}
{{- fail "model.files, model.configMap and model.git.repository are alternatives: set one of them, or none for a model in the image" }}
{{- end }}
{{- if and $values.workers.autoscaling.enabled (not (hasPrefix "kafka://" $values.settings.stream.url)) }}
{{- fail (printf "workers.autoscaling needs the lag of Kafka, but settings.stream.url is %s" $values.settings.stream.url) }}
{{- end }}
{{- $count := int $values.shards.count }}
{{- $shard := dict "kind" "StatefulSet" }}
{{- $last := lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-shard-%d" .Release.Name (sub $count 1)) }}
{{- $first := lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-shard-0" .Release.Name) }}
{{- if and $first (or (not $last) (lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-shard-%d" .Release.Name $count))) }}
{{- fail (printf "shards.count is %d, but release %s runs another number, which cannot change while it runs: uninstall it, which keeps the checkpoints, and install it with the new number" $count .Release.Name) }}
{{- end }}
{{- $other := lookup "v1" "ConfigMap" .Release.Namespace (include "streamtrain.publisher" .) }}
{{- if and $other (ne (index $other.metadata.labels "app.kubernetes.io/instance") .Release.Name) }}
{{- fail (printf "release %s publishes model %s to the same Redis: give this one another settings.publish.model" (index $other.metadata.labels "app.kubernetes.io/instance") $values.settings.publish.model) }}
{{- end }}
{{- end }}
