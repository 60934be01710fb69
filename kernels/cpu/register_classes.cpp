#include <torch/custom_class.h>

#include "compiled_program.h"
#include "segments.h"
#include "step_runner.h"

namespace specc {

// torch.classes.specc
TORCH_LIBRARY_FRAGMENT(specc, library) {
  library.class_<CompiledProgram>("CompiledProgram")
      .def(torch::init<const std::string&>())
      .def("set_num_threads", &CompiledProgram::set_num_threads)
      .def("num_threads", &CompiledProgram::num_threads)
      .def("set_narrow_rows", &CompiledProgram::set_narrow_rows)
      .def("weight_names", &CompiledProgram::weight_names)
      .def("bind_weights", &CompiledProgram::bind_weights)
      .def("bind_caches", &CompiledProgram::bind_caches)
      .def("expect_flat_inputs", &CompiledProgram::expect_flat_inputs)
      .def("expect_hidden", &CompiledProgram::expect_hidden)
      .def("run", &CompiledProgram::run);
  library.class_<SegmentedProgram>("SegmentedProgram")
      .def(torch::init<bool>())
      .def("add", &SegmentedProgram::add)
      .def("set_stream", &SegmentedProgram::set_stream)
      .def("set_num_threads", &SegmentedProgram::set_num_threads)
      .def("run", &SegmentedProgram::run);
  library.class_<StepRunner>("StepRunner")
      .def(torch::init<int64_t>())
      .def("set_constant", &StepRunner::set_constant)
      .def("begin_stage", &StepRunner::begin_stage)
      .def("call", &StepRunner::call)
      .def("call_program", &StepRunner::call_program)
      .def("call_segments", &StepRunner::call_segments)
      .def("getitem", &StepRunner::getitem)
      .def("size", &StepRunner::size)
      .def("arithmetic", &StepRunner::arithmetic)
      .def("value", &StepRunner::value)
      .def("literal", &StepRunner::literal)
      .def("list", &StepRunner::list)
      .def("release", &StepRunner::release)
      .def("pass_on", &StepRunner::pass_on)
      .def("run", &StepRunner::run)
      .def("step", &StepRunner::step)
      .def("steps", &StepRunner::steps)
      .def("get", &StepRunner::get)
      .def("outputs", &StepRunner::outputs)
      .def("seconds", &StepRunner::seconds)
      .def("program_seconds", &StepRunner::program_seconds);
}

}  // namespace specc
