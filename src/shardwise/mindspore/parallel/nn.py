"""Cells of pipelines and of accumulated gradients, under their newer names."""

from shardwise.mindspore.nn.wrap import GradAccumulationCell as GradAccumulation
from shardwise.mindspore.nn.wrap import MicroBatchInterleaved, PipelineGradReducer
from shardwise.mindspore.nn.wrap import PipelineCell as Pipeline

__all__ = ["GradAccumulation", "MicroBatchInterleaved", "Pipeline", "PipelineGradReducer"]
