"""Training on a GPU gives the numbers of the CPU. Run by hand: pytest -m gpu."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import slimstart
from tests.zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(inputs):
    return tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, inputs)


RATE = 2**-4  # exact in float32, too: a captured step has its learning rate in that


def loss_fn(net, images, labels):
    return F.cross_entropy(net(images), labels)


def train(name, device, coupling):
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.factory().double()
    images = torch.randn(8, *entry.example_inputs().shape[1:], dtype=torch.float64).to(device)
    labels = torch.randint(0, 10, (8,)).to(device)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    sparse = slimstart.SparseTraining(
        model,
        optimizer,
        images[:1],
        budget=slimstart.Flops(0.4),
        coupling=coupling,
        policy=slimstart.Paper(resample_every=2),
    )
    losses = [float(sparse.step(loss_fn, images, labels)) for _ in range(5)]
    file = io.BytesIO()
    torch.save(sparse.state_dict(), file)
    file.seek(0)
    sparse.load_state_dict(torch.load(file, weights_only=True))
    losses += [float(sparse.step(loss_fn, images, labels)) for _ in range(3)]
    dense = {name: tensor.cpu() for name, tensor in sparse.state_dict()["model"].items()}
    small = sparse.finish([(images, labels)] * 2, loss_fn).eval()
    return losses, sparse.keep_probs, dense, small(images).detach().cpu()


@pytest.mark.parametrize("coupling", ["filter", "stream"])
@pytest.mark.parametrize("name", ["vgg_bn", "resnet_basic", "wide_resnet", "mobilenet_v1", "densenet"])
def test_training_equals_the_cpu(name, coupling):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    ours, reference = train(name, "cuda", coupling), train(name, "cpu", coupling)
    assert ours[0] == pytest.approx(reference[0], abs=1e-10)
    # Adam divides by the root of a squared gradient, which makes more of differences in the last digits.
    assert torch.allclose(ours[1], reference[1], atol=1e-8)
    for key, tensor in reference[2].items():
        assert torch.allclose(ours[2][key].double(), tensor.double(), atol=1e-10), key
    assert torch.allclose(ours[3], reference[3], atol=1e-10)


@pytest.mark.filterwarnings("ignore:RNN module weights")  # a copied recurrent layer has its weights apart
@pytest.mark.parametrize("name", sorted(set(ZOO) - {"numpy_side", "numpy_feedback"}))
def test_the_graph_does_not_depend_on_the_device(name):
    entry = ZOO[name]
    torch.manual_seed(0)
    model, inputs = entry.factory(), entry.example_inputs()
    here = slimstart.trace(model, inputs)
    there = slimstart.trace(model.cuda(), on_gpu(inputs))
    assert here.num_units == there.num_units
    assert here.not_prunable.keys() == there.not_prunable.keys()
    assert slimstart.verify(model, on_gpu(inputs), num_masks=1).max_error < 1e-8
