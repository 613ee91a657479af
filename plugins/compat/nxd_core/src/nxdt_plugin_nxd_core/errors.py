"""Errors of loops over NxD Core's API (:mod:`nxdt_plugin_nxd_core`): codes ``NXDT-T05…`` and ``T06…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

ArgumentMeansNothing = NxdtError.define(
    "NXDT-T050",
    "An argument of NxD Core that has another meaning there than anything that this engine does.",
    "{call}: {argument}={value} {reason}.",
    "{advice}",
    usual_remedy="Leave the argument out, or give the value that the message names.",
)

ModelFnReturnsNoModule = NxdtError.define(
    "NXDT-T051",
    "The caller's function for the model gave something else.",
    "initialize_parallel_model: model_fn returned {found}, which is not a torch.nn.Module.",
    "Return the module from model_fn; positional and keyword arguments behind model_fn are passed to it.",
)

ModulesDifferBetweenRanks = NxdtError.define(
    "NXDT-T052",
    "Ranks have built different models.",
    "model_fn built a model on rank {rank} that differs from that of rank 0: {difference}.",
    "Build the whole model equally on each rank: layers are sharded afterwards. model_fn starts with the random-"
    "number generator of rank 0; do not seed it with the rank.",
)

LayersNotFound = NxdtError.define(
    "NXDT-T053",
    "A pipeline, or recomputation of layers, has no list of layers to work on.",
    "{wanted} needs the list of the model's layers, and {found}.",
    "Keep the layers in one torch.nn.ModuleList (or ModuleDict with the keys '0', '1', ...), and name their class: "
    "pipeline_config={{'transformer_layer_cls': YourLayer}}.",
)

StageModuleMisplaced = NxdtError.define(
    "NXDT-T054",
    "A module whose place in the pipeline is not what its order of registration says.",
    "'{path}' {reason}, so that it cannot be assigned to a pipeline stage.",
    "Register what runs before the layers before their ModuleList and what runs after them behind it, each as a "
    "module that has its own parameters.",
)

PipelineNeedsRunTrain = NxdtError.define(
    "NXDT-T055",
    "A forward pass of a model of which this rank has one stage.",
    "The model has {stages} pipeline stages, and this rank cannot run forward alone.",
    "Call model.run_train(...) for forward and backward, and model.run_eval(...) for the loss alone.",
)

LossNotFound = NxdtError.define(
    "NXDT-T056",
    "What the model returned has no loss where one is looked for.",
    "The model returned {found}, in which no loss was found.",
    "Return a scalar loss, a tuple that begins with it, or an object with the attribute or key 'loss'; or say where"
    " it is: pipeline_config={{'output_loss_value_spec': (True, False)}}.",
)

BatchDoesNotDivide = NxdtError.define(
    "NXDT-T057",
    "Rows that do not fall into equal micro-batches.",
    "A batch of {rows} rows does not divide into num_microbatches={micro_batches}.",
    "Give run_train a multiple of {micro_batches} rows, or change pipeline_config['num_microbatches'].",
)

NotOfThisModel = NxdtError.define(
    "NXDT-T058",
    "Parameters of another model than the one that was initialised.",
    "{call}: {problem} of the model that initialize_parallel_model returned.",
    "Pass model.parameters(), or groups of them, of the model of the same nxd_config.",
)

CheckpointTagMissing = NxdtError.define(
    "NXDT-T059",
    "There is no checkpoint of that tag.",
    "{path} has no complete checkpoint {which}; its tags are {tags:list12}.",
    "Name one of these tags, leave tag out for the newest, or save with save_checkpoint first.",
    also=lambda error: {"which": "at all" if error.tag is None else f"with the tag {error.tag!r}"},
)

OutputNotTensors = NxdtError.define(
    "NXDT-T060",
    "A loop of the caller's own got something from the model in which tensors cannot be found.",
    "The model returned a {found}, whose tensors cannot be found to average gradients over {ranks} ranks.",
    "Return tensors, or a tuple, a list, a dict or a dataclass of them; or use model.run_train(...).",
)

WorldDoesNotDivide = NxdtError.define(
    "NXDT-T061",
    "Processes that do not fall into groups of the sizes that were asked for.",
    "{world} processes were started, which do not divide into groups of tensor_parallel_size={tp} x "
    "pipeline_parallel_size={pp}.",
    "Start a multiple of {group} processes, for example: torchrun --nproc-per-node {group} SCRIPT",
    also=lambda error: {"group": error.tp * error.pp},
)

CallDoesNotBind = NxdtError.define(
    "NXDT-T063",
    "A call with arguments that the function does not have, or without some that it needs.",
    "{call}: {problem}.",
    "Its arguments are {arguments:, }.",
    usual_remedy="Take the arguments that the message lists; the page on NxD Core has them all.",
)

ConfigNotMade = NxdtError.define(
    "NXDT-T064",
    "A call that needs the process groups before they exist.",
    "{call} needs the layout, and neuronx_distributed_config was not called in this process.",
    "Call neuronx_distributed_config(...) first.",
)

RankFilesDoNotFit = NxdtError.define(
    "NXDT-T065",
    "Files of ``parallel_layers.save`` that are not there, or not of this layout.",
    "{path} {problem}.",
    "{advice}",
    usual_remedy="Name the directory that was saved in the same layout, and the key that it was saved under.",
)

RankFileUnreadable = NxdtError.define(
    "NXDT-T066",
    "A file of a rank that is damaged, or that names what could run code.",
    "{path} cannot be read: {reason}.",
    "Take another copy of the file, or save tensors, numbers and text alone.",
)
