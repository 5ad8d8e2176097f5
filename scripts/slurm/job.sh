# shellcheck shell=bash
# What the sbatch files of this folder share: they source it.
#
#   begin CONFIG [key=value ...]   sets RUN, the run's directory; from here on a signal asks the run to stop
#   run COMMAND ...                runs it to its end, or to PKM_GRACE seconds after a signal; sets `code`
#   finish                         ends the job as the run ended: requeued if it was stopped, else with its exit status
#
# Why a file STOP, and no signal, to the run: torchrun dies of a SIGUSR1 it was not told about and leaves the ranks
# behind; after a SIGTERM it kills them within 30 seconds (before torch 2.12 whatever one says), saved or not. A file is
# seen by all ranks at the same step, on any number of nodes, and the run has all of PKM_GRACE to save in.

asked=''    # the signal that came
deadline='' # SECONDS at which waiting for the run ends, once asked
code=0

say() { echo "$(date '+%F %T') job $SLURM_JOB_ID: $*"; }

begin() {
    export PYTHONUNBUFFERED=1
    # One rank's share of the node's cores: by itself every rank would start as many threads as there are cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-1} / PKM_RANKS > 0 ? ${SLURM_CPUS_PER_TASK:-1} / PKM_RANKS : 1))}
    # Should torchrun get a signal all the same, from `scancel` or a preemption: pass it on, and wait for the save.
    export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$PKM_GRACE
    # Ranks that are started again would meet by what those before them left in torchrun's own store, and wait for the dead
    # (pytorch issue 135712, seen up to torch 2.13): a new store for each start.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

    RUN=$(python "$PKM_ROOT/scripts/launch_slurm.py" --print-directory "$@") || exit 2
    mkdir -p "$RUN/slurm" || exit 2
    # A job that was killed while it waited for the run to stop leaves its STOP behind.
    if grep -qs '^SLURM job ' "$RUN/STOP"; then rm -f "$RUN/STOP"; fi
    status_before=$(status)
    trap 'ask SIGUSR1' USR1
    trap 'ask SIGTERM' TERM
    say "$RUN, $PKM_RANKS ranks on each of ${SLURM_JOB_NUM_NODES:-1} nodes, restart ${SLURM_RESTART_COUNT:-0} of this job"
}

ask() {
    if [[ -n $asked ]]; then return; fi
    asked=$1
    deadline=$((SECONDS + PKM_GRACE))
    say "$asked: asking the run to save and stop"
    echo "SLURM job $SLURM_JOB_ID, $asked" >"$RUN/STOP" || say "cannot write $RUN/STOP"
}

# The command is started itself, not through a shell that a signal could end before it.
run() {
    if [[ -n $asked ]]; then return; fi
    "$@" &
    local pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        if [[ -z $asked ]]; then
            wait "$pid" || true # a signal ends the waiting, not what is waited for
        elif ((SECONDS < deadline)); then
            sleep 1
        else
            say "the run did not stop within $PKM_GRACE s"
            code=1
            return
        fi
    done
    code=0
    wait "$pid" || code=$?
}

status() { cat "$RUN/status.json" 2>/dev/null || true; }
entry() { status | sed -n "s/.*\"$1\": *\"\\{0,1\\}\\([^\",]*\\).*/\\1/p"; }
newest() { cat "$RUN/checkpoints/latest" 2>/dev/null || echo none; }

finish() {
    local state
    state=$(entry state)
    # What an earlier job left there says nothing about this one.
    if [[ $(status) == "$status_before" && ($state != finished || $code != 0) ]]; then state=''; fi
    if [[ -n $asked && $state != stopped ]]; then rm -f "$RUN/STOP"; fi
    case $state in
    finished)
        say "finished: $RUN/report.md"
        exit 0
        ;;
    stopped)
        if [[ -z $asked && $(entry reason) == 'STOP file' ]]; then
            say "stopped at step $(entry step) by a file STOP that somebody wrote: submit the job again to go on"
            exit 0
        fi
        say "stopped at step $(entry step)"
        requeue
        ;;
    failed) say "failed at step $(entry step); not requeued: see $RUN/log.txt" ;;
    *)
        # Killed before it could say anything. Out of time, it may go on from its newest checkpoint, unless that is
        # where it was the last time too.
        if [[ -n $asked && $(newest) != "$(cat "$RUN/slurm/out-of-time" 2>/dev/null)" ]]; then
            newest >"$RUN/slurm/out-of-time"
            say "out of time; the run goes on from checkpoint $(newest)"
            requeue
        fi
        say "ended with status $code${asked:+, a second time without progress}; not requeued"
        ;;
    esac
    exit $((code == 0 ? 1 : code))
}

requeue() {
    local state
    state=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p') || true
    if [[ -n $state && $state != RUNNING ]]; then
        say "not requeued by this script: the job is $state (cancelled, or SLURM itself requeues it)"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "requeued"
    else
        say "SLURM refuses to requeue: submit the job again to go on"
        exit 1
    fi
    exit 0
}
