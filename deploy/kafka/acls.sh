#!/usr/bin/env bash
# Grants a role of acls.tsv to a user, with Kafka's own kafka-acls.sh:
#
#   acls.sh ROLE PRINCIPAL [ARGUMENTS OF kafka-acls.sh]
#   acls.sh worker User:freezepoint-worker --bootstrap-server broker:9093 --command-config admin.properties
#
# Environment: PREFIX (topic_prefix), GROUP (worker.group, for the reader reader.group), TRANSACTIONS
# (kafka.transactional_id_prefix), KAFKA_ACLS (the command; KAFKA_ACLS="echo kafka-acls.sh" only shows what would be run).
# Granting again changes nothing. ACTION=--remove takes the rights away.
set -euo pipefail

role=${1:?a role of acls.tsv}
principal=${2:?a principal, such as User:freezepoint-worker}
shift 2
table=$(dirname "${BASH_SOURCE[0]}")/acls.tsv
case $role in
    reader) default_group=freezepoint-trainer ;;
    *) default_group=freezepoint ;;
esac
prefix=${PREFIX-}
group=${GROUP:-$default_group}
transactions=${TRANSACTIONS:-freezepoint}
action=${ACTION:---add}
force=()
if [[ $action == --remove ]]; then force=(--force); fi
read -r -a command <<<"${KAFKA_ACLS:-kafka-acls.sh}"

found=
while IFS=$'\t' read -r named operation resource pattern name; do
    [[ $named == "$role" ]] || continue
    found=yes
    name=${name//\{prefix\}/$prefix}
    name=${name//\{group\}/$group}
    name=${name//\{transactions\}/$transactions}
    "${command[@]}" "$@" "$action" ${force[@]+"${force[@]}"} --allow-principal "$principal" --operation "$operation" \
        "--$resource" "$name" --resource-pattern-type "$pattern" </dev/null
done <"$table"

if [[ -z $found ]]; then
    echo "acls.sh: $table has no role $role" >&2
    exit 2
fi
