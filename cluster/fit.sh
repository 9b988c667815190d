# shellcheck shell=bash
# `fit ARGUMENTS` runs `fisher-lit fit ARGUMENTS` on the nodes of the job, one task per GPU. Sourced by the Slurm scripts.
#
# SIGUSR1 to the batch shell (the time limit is near) stops the run and puts the job back into the queue. After SIGTERM
# (preemption, requeue, cancellation) the run is stopped too, and Slurm decides what becomes of the job. Either way the
# job continues from its last checkpoint when it starts again.

fit() {
    local -a overlays=(-c cluster/stop_on_signal.yaml)
    if [ "$SLURM_NTASKS" -gt 1 ]; then
        overlays+=(-c configs/fsdp2.yaml)
    fi
    # Without srun's own --cpus-per-task, newer versions give each task one CPU.
    srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        fisher-lit fit "${overlays[@]}" "$@" \
        --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.num_nodes "$SLURM_NNODES" --ckpt_path last &
    step=$!
    requeue=
    trap on_notice USR1
    trap : TERM
    while kill -0 "$step" 2>/dev/null; do
        if [ -z "$requeue" ]; then
            wait "$step" || true
        elif [ "$(date +%s)" -lt "$deadline" ]; then
            sleep 1
        else
            # srun kills tasks that ignore its SIGTERM.
            kill "$step" 2>/dev/null || true
            wait "$step" || true
        fi
    done
    local status=0
    wait "$step" || status=$?
    if [ -n "$requeue" ] && [ "$status" -ne 0 ]; then
        echo "stopped before the time limit with status $status; the job goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$status"
}

on_notice() {
    requeue=1
    # An update that outlasts the notice would run into the time limit, after which nothing is requeued.
    local limit
    limit=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e || true)
    deadline=$((1 << 60))
    if [[ $limit == *T*:* ]]; then
        deadline=$(($(date -d "$limit" +%s) - 60))
    fi
    # srun passes it on to every task.
    kill -USR1 "$step" 2>/dev/null || true
}
