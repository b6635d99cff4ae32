# Makes kernel_sources.h: the kernels and what they include as strings, for NVRTC. Included, this adds the header to a
# target, to be made anew when a source changes; run with `cmake -P`, with OUTPUT and SOURCE_DIR given, it writes it.

cmake_policy(VERSION 3.18)  # run as a script, CMake asks for none, and takes that of CMake 2

# The headers that kernels.cu includes, and those that they include, relative to `source_dir`.
function(skipreduce_kernel_headers source_dir result)
  set(headers "")
  set(unread kernels.cu)
  while(unread)
    list(POP_FRONT unread file)
    get_filename_component(folder "${file}" DIRECTORY)
    file(STRINGS "${source_dir}/${file}" lines REGEX "^#include \"")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^#include \"([^\"]*)\".*" "\\1" header "${line}")
      if(folder)
        set(header "${folder}/${header}")
      endif()
      if(NOT header IN_LIST headers)
        list(APPEND headers "${header}")
        list(APPEND unread "${header}")
      endif()
    endforeach()
  endwhile()
  set(${result} "${headers}" PARENT_SCOPE)
endfunction()

function(skipreduce_embed_kernels target source_dir)
  get_filename_component(source_dir "${source_dir}" ABSOLUTE)
  skipreduce_kernel_headers("${source_dir}" headers)
  set(sources "${source_dir}/kernels.cu")
  foreach(header IN LISTS headers)
    list(APPEND sources "${source_dir}/${header}")
  endforeach()
  set(script "${source_dir}/EmbedSources.cmake")
  set(output_dir "${CMAKE_CURRENT_BINARY_DIR}/kernel_sources")
  set(output "${output_dir}/kernel_sources.h")
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${CMAKE_COMMAND}" -D "OUTPUT=${output}" -D "SOURCE_DIR=${source_dir}" -P "${script}"
    DEPENDS ${sources} "${script}"
    VERBATIM)
  # What includes what is looked up again when one of them changes.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources})
  target_sources(${target} PRIVATE "${output}")
  target_include_directories(${target} PRIVATE "${output_dir}")
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  skipreduce_kernel_headers("${SOURCE_DIR}" headers)
  file(READ "${SOURCE_DIR}/kernels.cu" text)
  string(CONCAT result "// Made by EmbedSources.cmake.\n\nnamespace skipreduce::cuda::sources {\n\n"
                       "constexpr const char* kKernels = R\"SKIPREDUCE(${text})SKIPREDUCE\";\n\n")
  set(names "")
  set(texts "")
  set(count 0)
  foreach(header IN LISTS headers)
    file(READ "${SOURCE_DIR}/${header}" text)
    string(APPEND result "constexpr const char* kHeader${count} = R\"SKIPREDUCE(${text})SKIPREDUCE\";\n\n")
    # NVRTC knows headers by the words that they are included by: the path from kernels.cu, or from a neighbour.
    get_filename_component(base "${header}" NAME)
    set(header_names "${header}" "${base}")
    list(REMOVE_DUPLICATES header_names)
    foreach(name IN LISTS header_names)
      string(APPEND names "\"${name}\", ")
      string(APPEND texts "kHeader${count}, ")
    endforeach()
    math(EXPR count "${count} + 1")
  endforeach()
  string(APPEND result "constexpr const char* kHeaderNames[] = {${names}};\n"
                       "constexpr const char* kHeaders[] = {${texts}};\n"
                       "constexpr int kNumHeaders = sizeof(kHeaders) / sizeof(kHeaders[0]);\n\n"
                       "}  // namespace skipreduce::cuda::sources\n")
  file(WRITE "${OUTPUT}" "${result}")
endif()
