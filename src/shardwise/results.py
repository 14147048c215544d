"""The types of what functions return, under one public name each: ``sw.results.Fits``."""

from shardwise.costs.memory import MemoryEstimate
from shardwise.costs.prediction import Prediction
from shardwise.foreign.outcome import Checked
from shardwise.layouts.layout import Layout
from shardwise.planning.fits import Fits
from shardwise.plans.auto_stages import AutoStagesReport
from shardwise.plans.difference import PlanDifference
from shardwise.plans.request import ParallelConfig, PlanRequest, SearchOptions, TrainingConfig
from shardwise.plans.result import PlanningResult, PlanReport
from shardwise.plans.survival import Survival
from shardwise.proof.rule_check import RuleReport
from shardwise.proof.verify import Report
from shardwise.report.alternatives import Comparison, ExpertWays, PipelineRanking, PlanRanking, WhatIf
from shardwise.report.explain import Explanation
from shardwise.report.search_reports import MicroBatches, StageExplanation, StageWhatIf
from shardwise.runtime.finite import NotFinite
from shardwise.runtime.parallel import Parallel as Pipeline
from shardwise.runtime.step_profile import PipelineProfile, StepProfile
from shardwise.runtime.whole_tensors import Norms
from shardwise.train.resuming import Checkpoint

__all__ = [
    "AutoStagesReport",
    "Checked",
    "Checkpoint",
    "Comparison",
    "ExpertWays",
    "Explanation",
    "Fits",
    "Layout",
    "MemoryEstimate",
    "MicroBatches",
    "Norms",
    "NotFinite",
    "ParallelConfig",
    "Pipeline",
    "PipelineProfile",
    "PipelineRanking",
    "PlanDifference",
    "PlanRanking",
    "PlanReport",
    "PlanRequest",
    "PlanningResult",
    "Prediction",
    "Report",
    "RuleReport",
    "SearchOptions",
    "StageExplanation",
    "StageWhatIf",
    "StepProfile",
    "Survival",
    "TrainingConfig",
    "WhatIf",
]
