# shellcheck shell=bash
# The environment of a job; the Slurm scripts source it in the repository's root. All settings are optional:
#   FISHER_LIT_MODULES   modules to load first, such as "cuda/12.8"
#   FISHER_LIT_VENV      virtual environment with the package; default .venv
#   FISHER_LIT_TMPDIR    scratch on the file system of the runs; default runs/tmp
#   HF_HOME              models and data sets, on a file system that all nodes see; default Hugging Face's
#   HF_HUB_OFFLINE       0 to let jobs download; default 1

if [ -n "${FISHER_LIT_MODULES:-}" ]; then
    # shellcheck disable=SC2086
    module load $FISHER_LIT_MODULES
fi
PATH=$(cd "${FISHER_LIT_VENV:-.venv}/bin" && pwd):$PATH
export PATH

# Lightning writes a checkpoint to TMPDIR and moves it into place, which is atomic within one file system only.
export TMPDIR=${FISHER_LIT_TMPDIR:-$PWD/runs/tmp}
mkdir -p "$TMPDIR"

export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export HF_DATASETS_OFFLINE=$HF_HUB_OFFLINE
export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export PYTHONUNBUFFERED=1
