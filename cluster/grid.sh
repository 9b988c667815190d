#!/usr/bin/env bash
# The paper's grid, condition × budget × seed (arXiv 2609.36262, Appendix B.2): Full, which has no budget, then Fisher, R0
# and R1 at each budget. Every run has an index.
#   cluster/grid.sh            index and name of every run
#   cluster/grid.sh INDEX      the run's arguments for `fisher-lit fit`, one a line
#   cluster/grid.sh initial    those of the run that measures the initial Fisher, which all runs of the grid share
# Settings: CONFIG, BUDGETS (percent of the coordinates), SEEDS, RUNS (directory of the runs).
set -euo pipefail

config=${CONFIG:-configs/rl_math500.yaml}
read -ra budgets <<<"${BUDGETS:-0.05 0.1 0.5 1 5}"
read -ra seeds <<<"${SEEDS:-0 1 2 3}"
runs=${RUNS:-runs/grid_$(basename "$config" .yaml)}

mask() {
    local key=--trainer.callbacks.init_args
    case $1 in
        full) ;;
        fisher)
            printf '%s\n' -c callbacks/mask_fisher.yaml "$key.q" "$2" "$key.source" fisher_file \
                "$key.path" "$runs/initial/analyses/fisher_step_000000.safetensors"
            ;;
        r0 | r1)
            printf '%s\n' -c callbacks/mask_random.yaml "$key.q" "$2" "$key.seed" "${1#r}"
            ;;
    esac
}

# config, the run's own arguments, then where it is written.
arguments() {
    local name=$1
    shift
    printf '%s\n' -c "$config" "$@" --trainer.logger.init_args.save_dir "$runs" --trainer.logger.init_args.name "$name"
}

if [ "${1:-}" = initial ]; then
    # The analysis runs before the first update; a fit without updates would skip it.
    arguments initial -c callbacks/fisher.yaml --trainer.callbacks.init_args.steps '[0]' \
        --trainer.max_steps 1 --trainer.limit_val_batches 0
    exit
fi

index=0
for condition in full fisher r0 r1; do
    condition_budgets=("${budgets[@]}")
    if [ "$condition" = full ]; then
        condition_budgets=("")
    fi
    for q in "${condition_budgets[@]}"; do
        for seed in "${seeds[@]}"; do
            name=$condition${q:+_q$q}_seed$seed
            if [ $# -eq 0 ]; then
                printf '%s\t%s\n' "$index" "$name"
            elif [ "$1" = "$index" ]; then
                mapfile -t own < <(mask "$condition" "$q")
                arguments "$name" "${own[@]}" --seed_everything "$seed"
                exit
            fi
            index=$((index + 1))
        done
    done
done
if [ $# -gt 0 ]; then
    echo "cluster/grid.sh: no run has the index '$1'; they go from 0 to $((index - 1))" >&2
    exit 2
fi
