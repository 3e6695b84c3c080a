# The node of one run: user-data, rendered by user_data.py beside it under a header of variables. See docs/node.md.
# It fetches the job archive by its hash and starts job/node, which decides everything else. Where that cannot be, nobody
# counts attempts: the fleet is deleted, so that no other machine follows, and this one shuts down.
set +a -uo pipefail
DIR=${GPUFLEET_ROOT:-}/opt/gpufleet
PER_BOOT=${GPUFLEET_ROOT:-}/var/lib/cloud/scripts/per-boot
IMDS=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
NODE='' ENDED='' ID=''
export IDENTITY='' AWS_REGION=$REGION AWS_DEFAULT_REGION=$REGION AWS_PAGER='' AWS_RETRY_MODE=standard AWS_MAX_ATTEMPTS=4
export AWS_METADATA_SERVICE_NUM_ATTEMPTS=4 # one by default: a role's keys can be some seconds late

retry() { # N COMMAND...: waits 3, 6, 9 ... s between
  local i
  for ((i = 1; i <= $1; i++)); do
    "${@:2}" && return 0
    ((i == $1)) || sleep $((i * 3))
  done
  return 1
}
limited() { # SECONDS COMMAND...: takes the place of its shell
  command -v timeout >/dev/null && exec timeout --foreground -k 60 "$@"
  exec "${@:2}"
}
aws() (limited 300 aws "$@" --cli-connect-timeout 10 --cli-read-timeout 60)
imds() {
  local token
  token=$(curl -sf -m 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "${IMDS%/}/latest/api/token") &&
    curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "${IMDS%/}/latest/$1"
}
put() { aws s3 cp "$DIR/$1" "s3://$BUCKET/$RUN_ID/$2" --only-show-errors; }
fetch() {
  aws s3 cp "s3://$BUCKET/inputs/$ARCHIVE_SHA256/job.tar.gz" "$DIR/job.tar.gz" --only-show-errors && python3 -c '
import hashlib, sys
found = hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()
sys.exit(found != sys.argv[2] and f"{sys.argv[1]}: sha256 is {found}, expected {sys.argv[2]}")' "$DIR/job.tar.gz" "$ARCHIVE_SHA256"
}
give_up() { # REASON
  local at fleet
  ENDED=yes at=$(date -u +%Y-%m-%dT%H:%M:%SZ)
  echo "$at attempt failed: $1"
  if [[ -n $ID ]]; then
    if [[ ! -e $DIR/attempt.json ]]; then # else job/node has written its record
      printf '{"instance": "%s", "booted_at": "%s", "exit": {"code": 1, "reason": "%s", "notice": false, "at": "%s"}}' \
        "$ID" "$at" "$1" "$at" >"$DIR/attempt.json"
      retry 3 put attempt.json "attempts/$ID.json"
    fi
    retry 2 put boot.log "boot/$ID.log"
    fleet=$(imds meta-data/tags/instance/aws:ec2:fleet-id) ||
      fleet=$(aws ec2 describe-instances --instance-ids "$ID" --output text \
        --query "Reservations[0].Instances[0].Tags[?Key=='aws:ec2:fleet-id']|[0].Value")
    retry 3 aws ec2 delete-fleets --fleet-ids "$fleet" --no-terminate-instances
    aws ec2 terminate-instances --instance-ids "$ID"
  fi
  retry 5 shutdown -h now
  exit 1
}

trap '[[ -n $ENDED ]] || give_up "the node script stopped unexpectedly"' EXIT
trap 'ENDED=yes; shutdown -h now; exit 143' TERM
IDENTITY=$(retry 10 imds dynamic/instance-identity/document)
ID=$(sed -n 's/.*"instanceId"[^"]*"\([^"]*\)".*/\1/p' <<<"$IDENTITY")
if [[ -n $ID && -e $DIR/instance && $(<"$DIR/instance") != "$ID" ]]; then # the disk is a copy of another machine's
  [[ $0 != "$PER_BOOT"/* ]] || { ENDED=yes && exit; }                       # whose script is not this machine's
  rm -rf "$DIR"
fi
mkdir -p "$DIR/app" "$PER_BOOT"
exec > >(trap '' TERM && exec tee -a "$DIR/boot.log") 2>&1
[[ -n $ID ]] || give_up "the metadata service does not answer"
echo "$ID" >"$DIR/instance"
cp "$0" "$PER_BOOT/gpufleet" # a rebooted machine runs this alone, and ends itself
retry 4 fetch && tar -xzf "$DIR/job.tar.gz" -C "$DIR/app" || give_up "the job archive cannot be had as declared"
(cd "$DIR/app" && limited $((TIMER_SECONDS + 600)) python3 -B -m gpufleet.job.node) & # which ends itself after TIMER_SECONDS
NODE=$!
trap 'kill -TERM "$NODE"' TERM
while kill -0 "$NODE" 2>/dev/null; do wait "$NODE"; done # SIGTERM interrupts wait, not the node
wait "$NODE" || give_up "job/node ended with $?"
ENDED=yes
