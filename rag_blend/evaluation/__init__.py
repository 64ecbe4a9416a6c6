"""How close blending comes to full prefill, on questions, on copying, on lookups, and in time to the first token."""

from rag_blend.evaluation.calibrate import Calibration, Candidate, CandidateResult, calibrate
from rag_blend.evaluation.cases import Case, Passage, joined, load_cases, shuffled
from rag_blend.evaluation.collection import cases_from_chunks, chunks_of
from rag_blend.evaluation.policies import Policy
from rag_blend.evaluation.quality import QualityBench
from rag_blend.evaluation.report import QualityReport
from rag_blend.evaluation.tasks import copy_cases, lookup_cases, unanswerable

__all__ = [
    "Calibration",
    "Candidate",
    "CandidateResult",
    "Case",
    "Passage",
    "Policy",
    "QualityBench",
    "QualityReport",
    "calibrate",
    "cases_from_chunks",
    "chunks_of",
    "copy_cases",
    "joined",
    "load_cases",
    "lookup_cases",
    "shuffled",
    "unanswerable",
]
