"""A vLLM plugin: lets a vLLM server take weights in the body of its own `/update_weights` request.

vLLM 0.32's own ways (NCCL, CUDA IPC and what builds on them) need a GPU on both sides. An installed fisher-lit
announces `register` to vLLM by the entry point `vllm.general_plugins`.
"""

BACKEND = "fisher_lit"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "fisher_lit"}'` known to vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "fisher_lit.vllm_plugin.http_weights", "HTTPWeightTransferEngine"
    )
