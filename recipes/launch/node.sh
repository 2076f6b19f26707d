#!/usr/bin/env bash
# One node of a Ray cluster that lives as long as one recipe; slurm.sh and skypilot.yaml run it on every node, from the
# repository's root:  node.sh recipes/RECIPE.py [flags]. The first host runs the recipe, whose exit code is that of its node.sh;
# the others serve until the first one's Ray is gone.
#
# HOSTS     names or addresses of all nodes, the head first       NODE   which of them this is (default: Slurm's)
# GPUS      of every node                                         PORT   of Ray's head
# NAME      of the run                                            JOB    a second start of the same job goes on, see below
# WAIT_S    in which all hosts must have joined (default 120)     PYTHON (default: .venv/bin/python, else python)
# RAY_FLAGS more options of `ray start`
set -u
{                                          # read whole before it runs: an edit during the run must not reach it
NODE=${NODE:-$SLURMD_NODENAME} HEAD=${HOSTS%% *} WAIT_S=${WAIT_S:-120}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
log=$(mktemp) ray='' child='' stopped=''

say() { echo "$NODE: $*" >&2; }

answers() { timeout 10 bash -c ": < /dev/tcp/$HEAD/$PORT" 2> /dev/null; }

# In the background, because bash answers a signal only between commands.
run() {
    [ -z "$stopped" ] || return 143
    "$@" &
    child=$!
    wait "$child"
    code=$?
    if [ $code -gt 128 ]; then             # the signal ended `wait`, not the command
        wait "$child"
        again=$?
        [ $again = 127 ] || code=$again
    fi
    return $code
}

# In a process group of its own, to end all of it: `ray stop` would end every Ray of this user on this machine.
start_ray() {
    # 2 CPUs: Ray starts a worker for each that it is told of, and the recipe's processes ask for none
    # shellcheck disable=SC2086
    setsid "$PYTHON" -m ray.scripts.scripts start "$@" --node-name="$NODE" --num-cpus=2 --disable-usage-stats --block \
        ${RAY_FLAGS:-} > "$log" 2>&1 &
    ray=$!
}

ray_lives() {
    kill -0 "$ray" 2> /dev/null && return
    say "Ray ended: $(grep -v '^ *$' "$log" | tail -n 3 | tr '\n' ' ')"
    return 1
}

# A node whose head is gone would take a minute to end by itself.
stop_ray() {
    kill -TERM "$ray"
    for _ in {1..20}; do
        kill -0 "$ray" || break
        sleep 0.5
    done
    kill -KILL -- "-$ray"
}
trap '[ -z "$ray" ] || stop_ray 2> /dev/null; rm -f "$log"' EXIT
trap 'trap "" TERM; stopped=1; [ -z "$child" ] || kill -TERM "$child" 2> /dev/null' TERM

if [ "$NODE" != "$HEAD" ]; then
    until answers || [ -n "$stopped" ]; do
        [ $SECONDS -lt "$WAIT_S" ] || exit 0                   # the head says who is missing
        run sleep 1
    done
    start_ray --address="$HEAD:$PORT"
    failed=0
    while [ -z "$stopped" ] && [ $failed -lt 3 ]; do
        if ! ray_lives; then                                   # Ray gives a node 30 s to start; a busy one may need two trials
            [ $SECONDS -lt $((WAIT_S - 20)) ] || break
            run sleep 20
            start_ray --address="$HEAD:$PORT"
        fi
        if answers; then failed=0; else failed=$((failed + 1)); fi
        run sleep 2
    done
    exit 0                                                     # what a lost node means for the run, the recipe says
fi

start_ray --head --port="$PORT" --include-dashboard=false
until answers; do
    ray_lives && [ -z "$stopped" ] || exit 1
    [ $SECONDS -lt "$WAIT_S" ] || { say "Ray's head did not answer at $HEAD:$PORT within $WAIT_S s"; exit 1; }
    run sleep 1
done
export RAY_ADDRESS=$HEAD:$PORT
# shellcheck disable=SC2086
run "$PYTHON" recipes/launch/wait_nodes.py $((WAIT_S - SECONDS)) "$GPUS" $HOSTS || exit

# A job that its scheduler started again goes on from its own checkpoint; another job with the same name does not, unless it says
# --resume. What was stopped before its first checkpoint starts anew, beside the old folder.
mkdir -p runs
if [ "$(cat "runs/.$NAME.job" 2> /dev/null)" = "$JOB" ] && [ -d "runs/$NAME" ]; then
    if compgen -G "runs/$NAME/checkpoints/step-*/state.json" > /dev/null; then
        say "job $JOB was started again: --resume"
        set -- "$@" --resume
    else
        aside=runs/$NAME.$(date +%m%d-%H%M%S)
        mv "runs/$NAME" "$aside"
        say "job $JOB was started again and had saved no checkpoint: its folder is now $aside"
    fi
fi
echo "$JOB" > "runs/.$NAME.job"
run "$PYTHON" "$@" --name "$NAME"
exit
}
