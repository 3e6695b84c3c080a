# The node of one run: user-data, rendered by infra/boot/user_data.py under a header of variables. See docs/node.md.
# The end is always: everything uploaded, done marker, fleet deleted, shutdown. Every other way out is a failed attempt:
# recorded, counted, and shut down too. Nothing here leaves a machine running.
set -uo pipefail
ROOT=${GPUFLEET_ROOT:-}
DIR=$ROOT/opt/gpufleet
RUN_URI=s3://$BUCKET/$RUN_ID
IMDS=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
INSTANCE_ID='' MANIFEST='' CONTAINER='' TIMER='' WATCH='' ENDED='' WHY=''
export DOCKER_CONFIG=$DIR/docker
export AWS_REGION=$REGION AWS_DEFAULT_REGION=$REGION AWS_PAGER='' AWS_RETRY_MODE=standard AWS_MAX_ATTEMPTS=4
export AWS_METADATA_SERVICE_NUM_ATTEMPTS=4 # one by default: a role's keys can be some seconds late

now() { date -u +%Y-%m-%dT%H:%M:%SZ; }
say() { echo "$(now) $*"; }
retry() { # N COMMAND...: waits 3, 6, 9 ... s between
  local tries=$1 i
  shift
  for ((i = 1; i <= tries; i++)); do
    "$@" && return 0 # a bare return in a trap gives the status from before the trap
    ((i == tries)) || sleep $((i * 3))
  done
  return 1
}
bounded() { # SECONDS COMMAND...: in the background, so that SIGTERM is heard at once
  command -v timeout >/dev/null || shift
  if [[ $1 == [0-9]* ]]; then timeout -k 10 "$@" & else "$@" & fi
  wait $!
}
aws() { command aws "$@" --cli-connect-timeout 10 --cli-read-timeout 60; } # no network: minutes, not an hour
last_line() { # FILE: as JSON takes it; docker ends with where to read more
  grep -v "^See '\|^Run '\|^$" "$1" | tail -n 1 | tr -d '\000-\037"\\' | cut -c -300
}
heard() { # COMMAND...: where it fails, WHY is the last line it says
  local code=0
  "$@" >"$DIR/said" 2>&1 || code=$?
  cat "$DIR/said"
  WHY=$( ((code == 0)) || last_line "$DIR/said")
  ((code != 124)) || WHY="no answer in $2 s" # of `bounded`
  return $code
}
imds() {
  local token
  token=$(curl -sf -m 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "${IMDS%/}/latest/api/token") &&
    curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "${IMDS%/}/latest/$1"
}
add() { # FILE KEY VALUE ...: adds to the JSON object in FILE what it lacks; values that are JSON stay so
  python3 -c '
import json, sys
def value(text):
    try: return json.loads(text)
    except ValueError: return text
path, *words = sys.argv[1:]
try: old = dict(json.load(open(path)))
except (OSError, ValueError, TypeError, RecursionError): old = {}
new = {key: value(text) for key, text in zip(words[::2], words[1::2])}
json.dump({**new, **old}, open(path, "w"), sort_keys=True)' "$@"
}
put() { aws s3 cp "$DIR/$1" "$RUN_URI/$2" --only-show-errors; }
get() { # URI FILE SHA256
  aws s3 cp "$1" "$2" --only-show-errors && python3 -c '
import hashlib, sys
found = hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()
sys.exit(found != sys.argv[2] and f"{sys.argv[1]}: sha256 is {found}, expected {sys.argv[2]}")' "$2" "$3"
}

identify() {
  local document
  document=$(imds dynamic/instance-identity/document) || return 1
  read -r INSTANCE_ID INSTANCE_TYPE ZONE LAUNCHED_AT < <(python3 -c '
import json, sys
d = json.loads(sys.argv[1])
print(d["instanceId"], d["instanceType"], d["availabilityZone"], d["pendingTime"])' "$document")
  [[ -n $INSTANCE_ID ]]
}
list_run() { KEYS=$(aws s3api list-objects-v2 --bucket "$BUCKET" --prefix "$RUN_ID/" --query 'Contents[].[Key]' --output text); }
look() { # one listing answers: is the run over, which manifest is the newest, were there attempts
  retry 6 list_run || return 1 # a fresh role may be refused for half a minute
  MANIFEST=$(grep -o 'ckpt/step_[0-9]*/manifest\.json$' <<<"$KEYS" | sort | tail -n 1)
  MANIFEST=${MANIFEST:+$RUN_ID/$MANIFEST}
}
is_done() { grep -qxF "$RUN_ID/done.json" <<<"$KEYS"; }
noticed() { [[ $(imds meta-data/spot/instance-action) == *'"action"'* ]] && echo true || echo false; }
futile_boots() { # in a row, noticed ones apart
  rm -rf "$DIR/attempts" && mkdir "$DIR/attempts" &&
    aws s3 cp "$RUN_URI/attempts/" "$DIR/attempts/" --recursive --only-show-errors && python3 -c '
import glob, json, sys
boots, count = [], 0
for path in glob.glob(sys.argv[1] + "/*.json"):
    try: boots += [boot for boot in [json.load(open(path))] if isinstance(boot, dict)]
    except (ValueError, RecursionError): pass
for boot in sorted(boots, key=lambda b: str(b.get("booted_at", "")), reverse=True):
    end = boot.get("exit") if isinstance(boot.get("exit"), dict) else {}
    if (boot.get("manifest_at_boot") or "") != sys.argv[2] or boot.get("results") and end.get("notice", not end): break
    count += not end.get("notice")
print(count)' "$DIR/attempts" "$MANIFEST"
}
record_exit() { # CODE REASON, into attempts/<instance>.json; what the supervisor wrote stays
  retry 3 aws s3 cp "$RUN_URI/attempts/$INSTANCE_ID.json" "$DIR/attempt.json" --only-show-errors
  add "$DIR/attempt.json" instance "$INSTANCE_ID" booted_at "$BOOTED_AT" exit \
    "{\"code\": $1, \"reason\": \"$2\", \"notice\": $(noticed), \"at\": \"$(now)\"}" &&
    retry 3 put attempt.json "attempts/$INSTANCE_ID.json"
}
put_done() { # REASON DETAIL, unless the supervisor has said it
  look && is_done && return 0
  rm -f "$DIR/done.json"
  add "$DIR/done.json" schema 1 reason "$1" detail "$2" instance "$INSTANCE_ID" at "$(now)" && retry 4 put done.json done.json
}
find_fleet() {
  FLEET=$(imds meta-data/tags/instance/aws:ec2:fleet-id) ||
    FLEET=$(aws ec2 describe-instances --instance-ids "$INSTANCE_ID" --output text \
      --query "Reservations[0].Instances[0].Tags[?Key=='aws:ec2:fleet-id']|[0].Value")
  [[ $FLEET == fleet-* ]]
}
delete_fleet() { # keeps this machine; a refusal is in the answer, not in the status
  local refused
  refused=$(aws ec2 delete-fleets --fleet-ids "$FLEET" --no-terminate-instances --output text \
    --query 'UnsuccessfulFleetDeletions[].Error.Message') && [[ $refused =~ ^(None)?$ ]]
}
stop_fleet() {
  if ! retry 3 find_fleet; then
    say "no fleet id: nothing to delete"
  elif retry 3 delete_fleet; then
    say "fleet $FLEET is deleted"
    # A deleted fleet has no expiry that would end a machine which hangs while it shuts down: AWS ends it from outside.
    aws ec2 terminate-instances --instance-ids "$INSTANCE_ID" --output text || say "left to shutdown alone"
  else
    say "fleet $FLEET cannot be deleted: its expiry ends it"
    upload_log
  fi
}
upload_log() { retry 2 put boot.log "boot/$INSTANCE_ID.log"; }

leave() { # the only way out
  ENDED=yes
  say "shutting down: $1"
  kill_quietly "$WATCH"
  retry 5 shutdown -h now && kill_quietly "$TIMER"
  exit 0
}
over() { # REASON DETAIL: the run has ended
  ENDED=yes
  say "the run is over: $1${2:+: $2}"
  upload_log
  put_done "$1" "$2" || say "the done marker cannot be written"
  stop_fleet
  leave "$1"
}
crash() { # REASON [CODE]: the fleet makes the next node, unless three in a row led nowhere
  local boots='' why=$1${WHY:+: $WHY}
  ENDED=yes
  say "attempt failed: $why"
  [[ ! -s $DIR/container.log ]] || tail -n 200 "$DIR/container.log"
  [[ -n $INSTANCE_ID ]] || leave "no metadata, so no rights either"
  upload_log
  record_exit "${2:-1}" "$why" && look && boots=$(futile_boots)
  if [[ -z $boots ]]; then # what cannot be counted must not be repeated
    say "the attempt cannot be counted"
    stop_fleet
  elif ((boots >= 3)); then
    over boot-loop "$boots boots in a row without progress; the last: $why"
  fi
  leave "$why"
}
interrupted() { # AWS charges a first hour we end, not one it interrupts
  local age i
  record_exit 75 interrupted
  upload_log
  age=$(python3 -c '
import datetime as d, sys
print(int((d.datetime.now(d.timezone.utc) - d.datetime.fromisoformat(sys.argv[1].replace("Z", "+00:00"))).total_seconds()))' \
    "$LAUNCHED_AT")
  if grep -q '"notice": true' "$DIR/attempt.json" && ((${age:-3600} < 3600)); then
    say "interrupted $age s after launch: waiting for AWS to end this machine"
    for ((i = 0; i < 180; i++)); do sleep 5; done
  fi
  leave interrupted
}
on_term() {
  [[ -z $ENDED ]] || return 0
  if [[ -n $CONTAINER ]]; then
    docker stop -t 115 "gpufleet-$INSTANCE_ID" >/dev/null &
    return 0
  fi
  say "terminated before or after the job"
  [[ -z $INSTANCE_ID ]] || record_exit 143 terminated
  leave terminated
}
timer() { # this machine's own stop, whatever job and supervisor do
  local sleeper
  trap 'kill "$sleeper" 2>/dev/null; exit' TERM
  sleep "$TIMER_SECONDS" &
  sleeper=$!
  wait "$sleeper"
  trap '' TERM
  touch "$DIR/timer"
  bounded 180 docker stop -t 115 "gpufleet-$INSTANCE_ID" >/dev/null # a docker that hangs must not keep the machine
  over timer "$TIMER_SECONDS s after boot"
}
watch_notice() { # until the job looks itself: a boot that AWS interrupts is no failed attempt
  local sleeper=''
  trap 'kill_quietly "$sleeper"; exit' TERM
  until [[ $(noticed) == true ]]; do
    sleep 4 &
    sleeper=$!
    wait "$sleeper"
  done
  trap '' TERM
  record_exit 75 interrupted
}
kill_quietly() { [[ -z $1 ]] || kill "$1" 2>/dev/null; }
yield_to_timer() { # once it has fired, it ends the run
  [[ -e $DIR/timer ]] || return 0
  ENDED=yes
  kill_quietly "$WATCH"
  wait "$TIMER"
  exit 0
}

local_nvme() { # SCRATCH: instance store if there is some, by model (EBS is /dev/nvme* too); else the root disk
  local disks
  SCRATCH=$DIR
  disks=$(lsblk -dnp -o NAME,MODEL 2>/dev/null |
    awk -v dev="$ROOT/dev/" 'index($1, dev) == 1 && /Amazon EC2 NVMe Instance Storage/ {print $1}')
  [[ -n $disks ]] || return 0
  bounded 120 systemctl start dlami-nvme # the AMI's own service makes one mount of them
  if findmnt -n "$ROOT/opt/dlami/nvme"; then
    SCRATCH=$ROOT/opt/dlami/nvme/gpufleet
  elif mkdir -p "$ROOT/scratch" && mkfs.xfs -q -f "${disks%%$'\n'*}" && mount "${disks%%$'\n'*}" "$ROOT/scratch"; then
    SCRATCH=$ROOT/scratch
  else
    say "instance store cannot be used: checkpoints go to the root disk"
    return 0
  fi
  docker_on "$SCRATCH/docker"
}
docker_on() { # 15-20 GB of image unpack faster there
  local config=$ROOT/etc/docker/daemon.json
  mkdir -p "$1" "${config%/*}"
  [[ -e $config ]] || echo '{}' >"$config"
  cp "$config" "$config.before" && add "$config" data-root "$1" && bounded 120 systemctl restart docker && return 0
  say "docker stays on the root disk"
  cp "$config.before" "$config"
  bounded 120 systemctl restart docker
}
data_volume() {
  local device=$ROOT$DATA_DEVICE
  retry 10 test -e "$device" || crash "$DATA_DEVICE did not appear"
  if [[ $DATA_VOLUME == blank ]]; then
    blkid -p "$device"
    if (($? == 2)); then mkfs.xfs -q "$device" || crash "$DATA_DEVICE cannot be formatted"; fi # 2: nothing is on it
  fi
  mkdir -p "$ROOT/data"
  mount "$device" "$ROOT/data" || crash "$DATA_DEVICE cannot be mounted"
}
log_in() { # to a private ECR, by this node's role; what it answers is what docker keeps of a login
  local host=${IMAGE%%/*} auth
  [[ $host =~ \.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\. ]] || return 0
  auth=$(aws ecr get-authorization-token --region "${BASH_REMATCH[1]}" --output text \
    --query 'authorizationData[0].authorizationToken') && mkdir -p "$DOCKER_CONFIG" &&
    echo "{\"auths\": {\"$host\": {\"auth\": \"$auth\"}}}" >"$DOCKER_CONFIG/config.json"
}
pull() { # not again where that cannot help
  heard log_in && heard bounded 1800 docker pull -q "$IMAGE" && return 0
  [[ ! $WHY =~ no\ space|not\ found|unknown|denied|no\ basic\ auth ]] || crash "the image cannot be pulled"
  return 1
}
run_container() { # CODE
  local name options=($CONTAINER_OPTIONS)
  # The image brings the CUDA it wants; some toolkits refuse it.
  [[ $DEVICE == cpu ]] || options+=(--gpus all -e NVIDIA_DISABLE_REQUIRE=true)
  [[ -z $DATA_VOLUME ]] || options+=(-v "$ROOT/data:/data")
  for name in AWS_ENDPOINT_URL AWS_EC2_METADATA_SERVICE_ENDPOINT AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY; do
    [[ -z ${!name:-} ]] || options+=(-e "$name")
  done
  (
    trap : TERM
    docker run --name "gpufleet-$INSTANCE_ID" --stop-timeout 115 --ipc host --ulimit memlock=-1 \
      --log-driver awslogs --log-opt mode=non-blocking --log-opt max-buffer-size=25m \
      --log-opt "awslogs-region=$REGION" --log-opt "awslogs-group=$LOG_GROUP" \
      --log-opt "awslogs-stream=$RUN_ID/$INSTANCE_ID" \
      -v "$DIR/app:/gpufleet/app:ro" -v "$SCRATCH/run:/gpufleet/run" -w /gpufleet/app \
      -e PYTHONPATH=/gpufleet/app -e "GPUFLEET_RUN_URI=$RUN_URI" -e "GPUFLEET_INSTANCE_ID=$INSTANCE_ID" \
      -e "GPUFLEET_INSTANCE_TYPE=$INSTANCE_TYPE" -e "GPUFLEET_ZONE=$ZONE" -e "GPUFLEET_LAUNCHED_AT=$LAUNCHED_AT" \
      -e AWS_REGION -e AWS_DEFAULT_REGION -e AWS_METADATA_SERVICE_NUM_ATTEMPTS ${options[@]+"${options[@]}"} \
      "$IMAGE" python -m job /gpufleet/run/run.json
    echo $? >"$DIR/code"
  ) >"$DIR/container.log" 2>&1 &
  CONTAINER=$!
  while kill -0 "$CONTAINER" 2>/dev/null; do wait "$CONTAINER"; done # SIGTERM interrupts wait, not the container
  CONTAINER=''
  CODE=$(cat "$DIR/code") || CODE=1
}

mkdir -p "$DIR/app"
exec > >(tee -a "$DIR/boot.log") 2>&1
BOOTED_AT=$(now)
trap '[[ -n $ENDED ]] || crash "the node script stopped unexpectedly"' EXIT
trap on_term TERM
say "gpufleet node of stack $STACK, run $RUN_ID"
retry 10 identify || crash "the metadata service does not answer"
say "$INSTANCE_ID $INSTANCE_TYPE $ZONE, launched $LAUNCHED_AT"
timer &
TIMER=$!
look || crash "the bucket cannot be listed"
if is_done; then
  ENDED=yes
  upload_log
  stop_fleet
  leave "the run was over before this boot"
fi
[[ ! -e $DIR/booted ]] || crash "the machine was rebooted"
touch "$DIR/booted" # later boots run this alone, and end at the line above
mkdir -p "$ROOT/var/lib/cloud/scripts/per-boot" && cp "$0" "$ROOT/var/lib/cloud/scripts/per-boot/gpufleet"
retry 4 get "$RUN_URI/run.json" "$DIR/run.json" "$RUN_CONFIG_SHA256" & # meanwhile
FIRST=$!
retry 4 get "s3://$BUCKET/inputs/$ARCHIVE_SHA256/job.tar.gz" "$DIR/job.tar.gz" "$ARCHIVE_SHA256" &
SECOND=$!
if grep -qF "$RUN_ID/attempts/" <<<"$KEYS"; then
  BOOTS=$(futile_boots) || crash "the attempts cannot be read"
  ((BOOTS < 3)) || over boot-loop "$BOOTS boots in a row without progress"
fi
add "$DIR/attempt.json" instance "$INSTANCE_ID" type "$INSTANCE_TYPE" zone "$ZONE" launched_at "$LAUNCHED_AT" \
  booted_at "$BOOTED_AT" manifest_at_boot "${MANIFEST:-null}"
retry 3 put attempt.json "attempts/$INSTANCE_ID.json" || crash "the attempt cannot be recorded"
watch_notice &
WATCH=$!
local_nvme
[[ -z $DATA_VOLUME ]] || data_volume
mkdir -p "$SCRATCH/run"
wait "$FIRST" && cp "$DIR/run.json" "$SCRATCH/run/" || crash "run.json cannot be had as declared"
wait "$SECOND" || crash "the job archive cannot be had as declared"
tar -xzf "$DIR/job.tar.gz" -C "$DIR/app" || crash "the job archive cannot be unpacked"
DEVICE=$(python3 -c 'import json, sys
print(json.load(open(sys.argv[1]))["job"]["parameters"]["device"])' "$SCRATCH/run/run.json") || crash "run.json names no device"
[[ $DEVICE == cpu ]] ||
  retry 3 heard bounded 120 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader ||
  crash "no working GPU"
retry 5 pull || crash "the image cannot be pulled"
yield_to_timer
say "starting the container"
kill_quietly "$WATCH"
WATCH=''
run_container
say "the container ended with $CODE"
yield_to_timer
case $CODE in
  0) record_exit 0 finished; over finished "" ;;
  70) record_exit 70 failed; over failed "the job failed for good" ;;
  75) interrupted ;;
  *)
    ((CODE < 125 || CODE > 127)) || WHY=$(last_line "$DIR/container.log") # docker's own codes: the job never began
    crash "the container ended with $CODE" "$CODE"
    ;;
esac
