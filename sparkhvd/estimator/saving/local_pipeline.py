"""Write a pipeline of one model to a folder of this host, for MLflow over Spark Connect.

MLflow lets Spark save a model, and copies the files to this host through the driver's JVM. A Connect client has no JVM.
Models of `pyspark.ml.connect` write the files themselves, and so does this class; the class in the metadata loads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.ml import PipelineModel
from pyspark.ml.connect.base import Model
from pyspark.ml.pipeline import PipelineSharedReadWrite
from pyspark.ml.util import DefaultParamsWriter

from sparkhvd.estimator.saving.persistence import ModelWriter, write_metadata
from sparkhvd.spark import active_session, ml_context

if TYPE_CHECKING:
    from sparkhvd.estimator.params.base import TorchParams


class LocalPipeline(Model):
    """Pipeline of one model, saved without a JVM and readable by `PipelineModel.load`."""

    def __init__(self, model: TorchParams) -> None:
        super().__init__()
        self.model = model

    def saveToLocal(self, path: str) -> None:  # noqa: N802 - MLflow's name
        """Write the files of `PipelineModel.save` to a new folder of this host."""
        spark = active_session()
        metadata = DefaultParamsWriter._get_metadata_to_save(
            PipelineModel([]),
            ml_context(spark),
            paramMap={"stageUids": [self.model.uid], "language": "Python"},
        )
        write_metadata(path, metadata)
        stage = PipelineSharedReadWrite.getStagePath(self.model.uid, 0, 1, f"{path}/stages")
        ModelWriter(self.model).session(spark).save_on_this_host(stage)
