// A CUDA device without values for a torch that was built for CPUs: it takes what torch asks of a device before it
// computes, and does nothing. Tensors on it exist in FakeTensorMode alone, which computes shapes, types and devices.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device device(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, device);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    c10::Device exchangeDevice(c10::Device) const override { return device; }
    c10::Device getDevice() const override { return device; }
    c10::Stream getStream(c10::Device) const noexcept override { return stream; }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
};

c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());

}  // namespace

struct CUDAHooks : at::CUDAHooksInterface {
    CUDAHooks(at::CUDAHooksArgs) {}
    bool hasCUDA() const override { return true; }
    bool isAvailable() const override { return true; }
    bool isBuilt() const override { return true; }
    void init() const override {}
    at::DeviceIndex deviceCount() const override { return 1; }
    at::DeviceIndex getCurrentDevice() const override { return 0; }
    at::DeviceIndex current_device() const override { return 0; }
    bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
};

using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
