"""The trace of a finalist on its way from the slot to the run's folder."""

import base64
from pathlib import Path

from tests.tuner.sessions import Bench, drive, measured
from train_worker.job import TrialJob
from train_worker.rank_report import SlotResult
from tuner.verify import verify


def test_the_first_repeat_of_each_side_leaves_its_trace(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    session = bench.session()
    drive(session)
    asked: list[bool] = []

    def run(job_json: str) -> str:
        job = TrialJob.model_validate_json(job_json)
        asked.append(job.keep_trace)
        trace = base64.b64encode(job.trial_id.encode()).decode() if job.keep_trace else ""
        return SlotResult(outcome=measured(1.0), attempts=1, wall_s=1.0, trace=trace).model_dump_json()

    verify(session, run)
    assert asked == [True, True, False, False]
    traces = sorted((bench.path.parent / "traces").iterdir())
    finalists = [record for record in bench.state().finished if record.purpose == "verify"][:2]
    assert [path.name for path in traces] == [f"{record.trial_id}.json.gz" for record in finalists]
    assert traces[0].read_bytes() == finalists[0].trial_id.encode()
    assert "trace" not in bench.path.read_text()
