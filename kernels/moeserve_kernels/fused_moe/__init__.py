"""The experts of one rank: permute, two grouped projections, unpermute and weigh."""

from moeserve_kernels.fused_moe.op import fused_moe
from moeserve_kernels.fused_moe.packed import ExpertRecord, ExpertShape, PackedExperts, make_record, pack_experts

__all__ = ["ExpertRecord", "ExpertShape", "PackedExperts", "fused_moe", "make_record", "pack_experts"]
